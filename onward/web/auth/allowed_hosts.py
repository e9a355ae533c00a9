"""The names and addresses by which clients may call a server that has no API keys.

The host name of a web page can be pointed at the server's address (DNS rebinding). The browser then treats both as one
origin, and the page can read the server's responses. Its requests are recognized by their `Host`, which is the page's
host name. An address in `Host` cannot be such a name, so probes by a pod's address and clients of other machines are
not affected.
"""

import ipaddress
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from onward.transport.addresses import is_loopback
from onward.web.auth.host_and_origin import canonical_host, parse_authority

ANY = "*"


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    names: frozenset[str]
    """Names and addresses as `host_and_origin` spells them, without a trailing dot."""
    has_addresses: bool
    """Whether every address is allowed: the server listens beyond this machine, and may be reached under addresses
    other than its own."""

    @staticmethod
    def for_server(listen_host: str, extra_names: Iterable[str]) -> "AllowedHosts":
        """Returns the hosts of a server that listens on `listen_host`. `extra_names` are further names of it."""
        is_local = is_loopback(listen_host)
        own_names = ("localhost", listen_host) if is_local else ("localhost", listen_host, socket.gethostname())
        return AllowedHosts(frozenset(_usable((*own_names, *extra_names))), not is_local)

    def allows(self, authority: str) -> bool:
        """Returns whether a `Host` header may have this value."""
        if ANY in self.names:
            return True
        parsed = parse_authority(authority)
        if parsed is None:
            return False
        host = parsed.host.removesuffix(".")
        if host in self.names or host.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return self.has_addresses or (getattr(address, "ipv4_mapped", None) or address).is_loopback


def normalized_host(name: str) -> str:
    """Returns a name or an address in the form in which `Host` headers are compared. Raises `ValueError` for a name
    that no `Host` header can have."""
    is_bracketed = name.startswith("[") and name.endswith("]") and ":" in name
    return ANY if name == ANY else canonical_host(name[1:-1] if is_bracketed else name).removesuffix(".")


def _usable(names: Iterable[str]) -> Iterator[str]:
    """Yields the names that a `Host` header can have. The machine's own name may not be one."""
    for name in names:
        with suppress(ValueError):
            yield normalized_host(name)
