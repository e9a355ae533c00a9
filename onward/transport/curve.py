"""Binds and connects zmq sockets that only holders of a key can use.

A private address carries its own key, for the processes of one instance. The instances of a cluster derive their keys
from the common secret, so without the secret a process can neither listen nor send.
"""

import hashlib
from typing import Any

import zmq
from zmq.utils import z85

KEY_MARK = "#"


def make_private_address(name: str) -> tuple[str, str]:
    """Returns a new local address in two forms: the one that its owner binds, and the one that its peers connect to."""
    public, secret = zmq.curve_keypair()
    endpoint = f"ipc://@onward-{name}{KEY_MARK}"
    return endpoint + z85.decode(secret).hex(), endpoint + z85.decode(public).hex()


def bind(socket: "zmq.Socket[Any]", address: str) -> None:
    endpoint, _, secret = address.partition(KEY_MARK)
    if secret:
        set_curve_server(socket, bytes.fromhex(secret))
    socket.bind(endpoint)


def connect(socket: "zmq.Socket[Any]", address: str) -> None:
    """Connects to an address. If it carries a key, both sides must hold it for messages to pass."""
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
    """Returns the CURVE secret key of the sockets on which prefill instances accept handoffs. It is a hash of the
    cluster key, so all instances of the cluster derive the same one."""
    return hashlib.blake2b(bytes.fromhex(cluster_key), digest_size=32, person=b"onward handoff").digest()


def cluster_public(cluster_key: str) -> bytes:
    """Returns the public key that a sender must know. It is derived from the secret, and never published."""
    return z85.decode(zmq.curve_public(z85.encode(cluster_secret(cluster_key))))
