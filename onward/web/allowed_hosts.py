"""The names and addresses by which clients may call a server that has no API keys.

A web page can give its own host name the server's address (DNS rebinding). To the browser both are then one origin, and
the page reads the server's responses. Its requests are known by their `Host`, which is the page's host name. An address
in `Host` cannot be such a name, so that probes by a pod's address and clients of other machines are not affected.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from onward.transport.addresses import is_loopback

ANY = "*"
_AUTHORITY = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<host>[^:\[\]]+))(?::\d*)?")


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    names: frozenset[str]
    """In lower case; addresses too."""
    has_addresses: bool
    """Any address will do: the server listens beyond this machine, and may be reached by others than its own."""

    @staticmethod
    def of(bound: str, named: Iterable[str]) -> "AllowedHosts":
        """`bound`: the address that the server listens on. `named`: what it is called beside that."""
        stays_here = is_loopback(bound)
        own = ("localhost", bound) if stays_here else ("localhost", bound, socket.gethostname())
        names = frozenset(name.lower().removesuffix(".") for name in (*own, *named) if name)
        return AllowedHosts(names, not stays_here)

    def has(self, authority: str) -> bool:
        """Whether this is the value of a `Host` header that may be used."""
        if ANY in self.names:
            return True
        host = host_in(authority)
        if host is None:
            return False
        if host in self.names or host.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return self.has_addresses or address.is_loopback


def host_in(authority: str) -> str | None:
    """The host of `HOST[:PORT]`, in lower case and without brackets. None: it is malformed."""
    match = _AUTHORITY.fullmatch(authority.lower())
    return None if match is None else match["ipv6"] or match["host"].removesuffix(".")
