"""Parses `HOST[:PORT]` and origins into the spelling that browsers use, so that equal values are spelled alike.

A value that a browser would not send is refused, not repaired: another parser could find another host in it.
"""

import ipaddress
import re
from typing import NamedTuple

DEFAULT_PORTS = {"http": 80, "https": 443}
_AUTHORITY = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[^:\[\]]+))(?::(?P<port>[0-9]{0,5}))?")
_NAME = re.compile(r"(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}\.?")
_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)\.?")
"""A name whose last label is a number. Browsers read it as an IPv4 address, and write that in four decimal numbers."""
_OTHER_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[!-~]+")
_NOT_IN_AUTHORITY = re.compile(r"[/?#@\\%]")


class Authority(NamedTuple):
    host: str
    port: int | None

    def with_port(self, default: int) -> "Authority":
        return self if self.port is not None else Authority(self.host, default)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"


def parse_authority(text: str) -> Authority | None:
    """Returns None for a malformed text. An empty port counts as none."""
    match = _AUTHORITY.fullmatch(text.lower()) if text.isascii() else None
    if match is None or (port := int(match["port"] or 0)) > 65535:
        return None
    try:
        host = _ipv6(match["ipv6"]) if match["ipv6"] else canonical_host(match["name"])
    except ValueError:
        return None
    return Authority(host, port if match["port"] else None)


def canonical_host(host: str) -> str:
    """Returns the canonical spelling of a name or an address without brackets. Raises a `ValueError` that says what is
    wrong.

    Names beyond ASCII are refused: browsers and Python differ in the ASCII form of some (`ß`), so the result could be
    the name of another site.
    """
    if not host.isascii():
        raise ValueError("write it in its ASCII form, which begins with xn--")
    host = host.lower()
    if ":" in host:
        return _ipv6(host)
    if not _NAME.fullmatch(host) or len(host) > 254:
        raise ValueError("it is neither a name nor an address without a port")
    return str(ipaddress.IPv4Address(host.removesuffix("."))) if _NUMBER.fullmatch(host) else host


def _ipv6(host: str) -> str:
    if "%" in host:
        raise ValueError("an address has no zone here")
    address = ipaddress.IPv6Address(host)
    if (mapped := address.ipv4_mapped) is None:
        return address.compressed
    # Python versions differ in the form of these addresses. This is the form of browsers.
    return f"::ffff:{int(mapped) >> 16:x}:{int(mapped) & 0xFFFF:x}"


def canonical_origin(origin: str) -> str:
    """Returns an origin as browsers send it. Raises `ValueError` if it is not an origin."""
    scheme, separator, rest = origin.partition("://")
    scheme = scheme.lower()
    if not separator or _NOT_IN_AUTHORITY.search(rest):
        raise ValueError("it looks like https://example.com, without a path")
    if scheme not in DEFAULT_PORTS:
        if not _OTHER_ORIGIN.fullmatch(f"{scheme}://{rest}"):
            raise ValueError("it looks like https://example.com, without a path")
        return f"{scheme}://{rest}"
    authority = parse_authority(rest)
    if authority is None:
        raise ValueError("its host is neither a name in ASCII nor an address")
    port = None if authority.port == DEFAULT_PORTS[scheme] else authority.port
    return f"{scheme}://{Authority(authority.host, port)}"


def is_same_origin(origin: str, host: str | None) -> bool:
    """Returns whether a page of this origin was served from `host`, the request's Host header. Host and port must be
    equal; a missing port is the default of the origin's scheme. The schemes may differ, because a proxy may terminate
    TLS. False if a value is malformed or missing, or the origin is not http or https."""
    scheme, _, rest = origin.partition("://")
    default = DEFAULT_PORTS.get(scheme)
    page_authority, server_authority = parse_authority(rest), parse_authority(host or "")
    if default is None or page_authority is None or server_authority is None:
        return False
    return page_authority.with_port(default) == server_authority.with_port(default)
