"""Parses and checks URLs of HTTP servers, http://HOST:PORT or https://HOST:PORT, before anything connects to them.

An unusable URL is refused where it is announced. The resolver, the event loop and aiohttp each raise another kind of
error for such a URL, and raise it only when a request is already under way.
"""

import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

MAX_HOST_LENGTH = 253
"""RFC 1035."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_BRACKETED = re.compile(r"\[[0-9a-fA-F:.]+\](:\d*)?")
_NAME = re.compile(r"[a-z0-9_.-]+")
_NOT_PRINTABLE = re.compile(r"[\x00-\x20\x7f-\xa0]")


@dataclass(frozen=True, slots=True)
class ServerUrl:
    scheme: str
    host: str
    """In ASCII and lower case; an IPv6 address without brackets."""
    port: int | None
    """None: the default port of the scheme."""

    @property
    def is_tls(self) -> bool:
        return self.scheme == "https"

    @property
    def effective_port(self) -> int:
        return self.port or _DEFAULT_PORTS[self.scheme]

    @property
    def authority(self) -> str:
        """Host and port as in a `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


@lru_cache(maxsize=1024)
def parse_server_url(url: str) -> ServerUrl:
    """Raises `ValueError` for an invalid URL, with the reason."""
    if _NOT_PRINTABLE.search(url):
        raise ValueError("it has white space or control characters")
    parts = urlsplit(url)
    if parts.scheme not in _DEFAULT_PORTS:
        raise ValueError("it does not begin with http:// or https://")
    if parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError("it has more than a host and a port")
    if "[" in parts.netloc and not _BRACKETED.fullmatch(parts.netloc):
        raise ValueError("its host is not an IPv6 address in brackets")
    port = parts.port
    if port == 0 or parts.netloc.endswith(":"):
        raise ValueError("its port is not one of 1 to 65535")
    return ServerUrl(parts.scheme, check_host(parts.hostname or ""), port)


def check_host(host: str) -> str:
    """Returns a name or an address in lower-case ASCII. Raises `ValueError` for one that cannot be resolved or
    connected to."""
    if ":" in host:
        address = ipaddress.IPv6Address(host)
    else:
        host = host.lower().encode("idna").decode()
        if not _NAME.fullmatch(host) or len(host.removesuffix(".")) > MAX_HOST_LENGTH:
            raise ValueError(f"{host[:80]!r} is not the name of a host")
        address = _address(host)
    if address is not None and address.is_unspecified:
        raise ValueError(f"{host} is not the address of one host")
    return host


def _address(host: str) -> ipaddress.IPv4Address | None:
    try:
        return ipaddress.IPv4Address(host)
    except ValueError:
        return None
