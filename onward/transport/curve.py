"""Binding and connecting zmq sockets whose messages only holders of a key get across.

A private address carries its own key, for processes of one instance. Instances of a cluster derive theirs from the one
secret that they share, so whoever does not hold it can neither listen nor speak.
"""

import hashlib
from typing import Any

import zmq
from zmq.utils import z85

KEY_MARK = "#"


def make_private_address(name: str) -> tuple[str, str]:
    """A new local address: as its owner binds it, and as its peers connect to it."""
    public, secret = zmq.curve_keypair()
    endpoint = f"ipc://@onward-{name}{KEY_MARK}"
    return endpoint + z85.decode(secret).hex(), endpoint + z85.decode(public).hex()


def bind(socket: "zmq.Socket[Any]", address: str) -> None:
    endpoint, _, secret = address.partition(KEY_MARK)
    if secret:
        set_curve_server(socket, bytes.fromhex(secret))
    socket.bind(endpoint)


def connect(socket: "zmq.Socket[Any]", address: str) -> None:
    """Whoever does not hold the address's key, on either side, gets no message across."""
    endpoint, _, server_key = address.partition(KEY_MARK)
    if server_key:
        set_curve_client(socket, bytes.fromhex(server_key))
    socket.connect(endpoint)


def set_curve_server(socket: "zmq.Socket[Any]", secret: bytes) -> None:
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)


def set_curve_client(socket: "zmq.Socket[Any]", server_key: bytes) -> None:
    public, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, z85.decode(public))
    socket.setsockopt(zmq.CURVE_SECRETKEY, z85.decode(secret))


def cluster_secret(cluster_key: str) -> bytes:
    """The secret of everyone who listens for instances of this cluster."""
    return hashlib.blake2b(bytes.fromhex(cluster_key), digest_size=32, person=b"onward handoff").digest()


def cluster_public(cluster_key: str) -> bytes:
    """What one must know to speak to them. It is derived from the secret, and never shown to anyone."""
    return z85.decode(zmq.curve_public(z85.encode(cluster_secret(cluster_key))))
