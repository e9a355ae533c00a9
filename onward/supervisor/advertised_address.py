"""What others call this machine. Sends nothing: the kernel is only asked for the way to them."""

import socket

from onward.transport.addresses import is_loopback

LOOPBACK = "127.0.0.1"
WILDCARDS = ("", "0.0.0.0", "::")
_OWN_LOOPBACK = {"": LOOPBACK, "0.0.0.0": LOOPBACK, "::": "::1"}
UNROUTED_ADDRESS = "192.0.2.1"
"""An address that belongs to nobody: the way to it is the way out of this machine."""


def advertised_host(host: str, callers: tuple[str, ...] = ()) -> str:
    """What others may call a host that one listens on. Where that is all addresses, it is the one on the way to the first
    of those who shall call, if they are elsewhere."""
    if host not in WILDCARDS:
        return host
    remote_callers = [caller for caller in callers if not is_loopback(caller)]
    return source_address_to(remote_callers[0] if remote_callers else UNROUTED_ADDRESS)


def loopback_for(host: str) -> str:
    """What this machine itself may call a host that one listens on."""
    return _OWN_LOOPBACK.get(host, host)


def source_address_to(host: str) -> str:
    """This machine's address on the way to that one."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    except OSError:
        return LOOPBACK
