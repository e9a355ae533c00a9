"""The names and addresses by which clients may call a server that has no API keys.

A web page can give its own host name the server's address (DNS rebinding). To the browser both are then one origin, and
the page reads the server's responses. Its requests are known by their `Host`, which is the page's host name. An address
in `Host` cannot be such a name, so that probes by a pod's address and clients of other machines are not affected.
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
    """As `authorities` spells them, without a last dot; addresses too."""
    has_addresses: bool
    """Any address will do: the server listens beyond this machine, and may be reached by others than its own."""

    @staticmethod
    def for_server(listen_host: str, extra_names: Iterable[str]) -> "AllowedHosts":
        """`listen_host`: the address that the server listens on. `extra_names`: what it is called beside that."""
        is_local = is_loopback(listen_host)
        own_names = ("localhost", listen_host) if is_local else ("localhost", listen_host, socket.gethostname())
        return AllowedHosts(frozenset(_usable((*own_names, *extra_names))), not is_local)

    def allows(self, authority: str) -> bool:
        """Whether this is the value of a `Host` header that may be used."""
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
    """A name or an address as `Host` headers are compared with it. Raises `ValueError` for what no `Host` can be."""
    is_bracketed = name.startswith("[") and name.endswith("]") and ":" in name
    return ANY if name == ANY else canonical_host(name[1:-1] if is_bracketed else name).removesuffix(".")


def _usable(names: Iterable[str]) -> Iterator[str]:
    """The machine may be called what no `Host` can be."""
    for name in names:
        with suppress(ValueError):
            yield normalized_host(name)
