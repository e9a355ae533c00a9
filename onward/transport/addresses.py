"""Builds, parses and checks handoff addresses, tcp://HOST:PORT or ipc://PATH."""

import ipaddress
from urllib.parse import urlsplit

from onward.errors import StartupError


def tcp_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_local(address: str) -> bool:
    """Returns whether only processes of this machine can be at the other end."""
    if address.startswith("ipc://"):
        return True
    return is_loopback(host_and_port(address)[0])


def host_and_port(address: str) -> tuple[str, int]:
    """Returns host and port of a tcp address. Raises `StartupError` for an invalid one."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = parts = None
    if parts is None or parts.scheme != "tcp" or not host or not port or parts.path or "@" in parts.netloc:
        raise StartupError(f"{address!r} is not the address of a prefill instance; it looks like tcp://HOST:PORT")
    return host, port


def check_handoff_address(address: str, flag: str) -> None:
    if address.startswith("ipc://") and address != "ipc://":
        return
    try:
        host_and_port(address)
    except StartupError as fault:
        raise StartupError(f"{flag}: {fault.message}") from None


def require_cluster_key(address: str, cluster_key: str) -> None:
    """Raises `StartupError` if `address` reaches beyond this machine and `cluster_key` is empty: messages would be
    neither encrypted nor authenticated."""
    if not cluster_key and not is_local(address):
        raise StartupError(
            f"{address} reaches beyond this machine, so the instances need a common secret: make one with "
            "`onward keygen FILE`, copy it to every machine, and give it to each instance with --cluster-key-file FILE"
        )
