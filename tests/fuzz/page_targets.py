"""What a browser sends for a web page (`Host`, `ClientRequest`, `Sec-Fetch-Site`, `Content-Type`), and the names and
origins that an operator allows.

The expected decisions come from other parsers than the server's: `urllib` and `ipaddress` for hosts, the algorithm of the
Fetch standard for types that a page may send without a preflight.
"""

import asyncio
import ipaddress
import json
import re
from contextlib import suppress
from typing import Any
from urllib.parse import SplitResult, urlsplit

from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from onward.cli.flag_checks import check_allowed_hosts, check_origins
from onward.errors import StartupError
from onward.web import asgi
from onward.web.auth.allowed_hosts import ANY, AllowedHosts, normalized_host
from onward.web.auth.cross_site import CrossSiteGuard, check_content_type, with_cors
from onward.web.auth.host_and_origin import canonical_origin
from tests.fuzz.case import Target
from tests.web.exchange import exchanged

HOSTS = [
    "localhost", "app.localhost", "127.0.0.1", "[::1]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "[::FFFF:7f00:1]",
    "gpu-box.example", "[2001:db8::1]", "[2001:DB8:0::1]", "bücher.example", "xn--bcher-kva.example", "faß.example",
    "fass.example", "attacker.example", "192.0.2.7", "0.0.0.0", "[::]", "2130706433", "0x7f.1", "127.1", "[::1%25lo]",
    "[127.0.0.1]", "::1", "gpu_box", "null",
]  # fmt: skip
PIECES = [
    ".", "..", ":", ":8000", ":80", ":443", ":080", ":0", ":99999", ":8000:1", "@", "user@", "a:b@", "/", "/.localhost",
    "#", "?", "\\", "%", "%00", "%2e", " ", "\t", "\n", "\x00", "\xa0", "[", "]", "-", "_", "é", "１", "。", "ſ", ",",
]  # fmt: skip
ORIGIN_PIECES = ["http://", "https://", "HTTP://", "chrome-extension://", "tauri://", "null", "//", "://", *PIECES]
NAME = re.compile(r"(?!(.*\.)?(0x[0-9a-f]*|[0-9]+)\.?$)[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?")
"""The name of a host. A name whose last label is a number is an address, which browsers write in another way."""
DEFAULT_PORTS = {"http": 80, "https": 443}
BOUND = ["127.0.0.1", "::1", "localhost", "0.0.0.0"]
NO_PREFLIGHT = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")


class Refused(Exception):
    """The server does not serve such a request, or does not start with such a flag."""


def _json(*tree: Any) -> bytes:
    return json.dumps(tree).encode()


def _in_header(text: str) -> str:
    return text.encode(errors="surrogatepass").decode("latin-1")


def _scope(headers: dict[str, str | None], method: str = "POST") -> Scope:
    given = [(name.encode(), value.encode("latin-1")) for name, value in headers.items() if value is not None]
    return {"type": "http", "method": method, "path": "/v1/abort", "query_string": b"", "headers": given}


def _split(url: str) -> SplitResult | None:
    """None where any parser may see another host than this one does."""
    if re.search(r"[\x00-\x20\x7f-\xff\\%#?@]|[^/]\[|\[[^:]*\]|\][^:]", url):
        return None
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return parts if parts.hostname and not parts.path else None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _same(host: str, other: str) -> bool:
    address = _address(host)
    return host.removesuffix(".") == other.removesuffix(".") if address is None else address == _address(other)


def _names_the_server(authority: str, bound: str, named: list[str]) -> bool:
    parts = _split("http://" + authority)
    if parts is None or parts.hostname is None:
        return False
    host = parts.hostname.removesuffix(".")
    address = _address(host)
    if address is not None and (address.is_loopback or bound == "0.0.0.0"):
        return True
    if NAME.fullmatch(host) and (host == "localhost" or host.endswith(".localhost")):
        return True
    return any(_same(host, name.lower().strip("[].")) for name in named if name.isascii())


def _flags_are_taken(check: Any, values: list[str]) -> bool:
    try:
        check(tuple(values))
    except StartupError:
        return False
    return True


def _hosts(data: bytes) -> None:
    """Only the server's names are served, in every spelling alike, and every name that the flag takes is one."""
    bound, named, text = json.loads(data)
    if not _flags_are_taken(check_allowed_hosts, named):
        raise Refused
    hosts, host = AllowedHosts.for_server(bound, named), _in_header(text)
    for name in named:
        assert normalized_host(normalized_host(name)) == normalized_host(name)
        address = _address(name.strip("[]"))
        sent = f"[{address.compressed}]" if isinstance(address, ipaddress.IPv6Address) else str(address or name)
        assert hosts.allows(_in_header(sent)), f"{name} is allowed and refused"
    is_served = CrossSiteGuard(hosts, ()).refusal(_scope({"host": host})) is None
    for spelling in (host.upper(), host.lower(), host.swapcase()):
        if host.isascii():
            assert hosts.allows(spelling) == is_served, "case decides"
    if ANY in named:
        return
    if is_served:
        assert _names_the_server(host, bound, named), f"{host!r} is no name of this server"
    else:
        raise Refused


def _host_cases() -> st.SearchStrategy[bytes]:
    piece = st.sampled_from(HOSTS) | st.sampled_from(PIECES) | st.text(max_size=3)
    text = st.lists(piece, max_size=3).map("".join)
    authority = st.builds(lambda host, port: host + port, st.sampled_from(HOSTS), st.sampled_from(["", ":8000", "."]))
    named = st.lists(st.sampled_from([*HOSTS, ANY]) | authority | text, max_size=1)
    return st.builds(_json, st.sampled_from(BOUND), named, authority | text)


def _origin_of(parts: SplitResult | None) -> tuple[str, int] | None:
    if parts is None or parts.scheme not in DEFAULT_PORTS or parts.hostname is None:
        return None
    return parts.hostname, DEFAULT_PORTS[parts.scheme] if parts.port is None else parts.port


def _is_same_origin(origin: str, host: str | None) -> bool:
    page = _split(origin)
    if host is None or page is None:
        return False
    there, here = _origin_of(page), _origin_of(_split(f"{page.scheme}://{host}"))
    return there is not None and here is not None and there[1] == here[1] and _same(there[0], here[0])


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    await asgi.respond(send, 200, b"{}")


def _origins(data: bytes) -> None:
    """Pages of listed origins and of the server's own are served, and only listed ones may read the response."""
    listed, origin, host, site = json.loads(data)
    if not _flags_are_taken(check_origins, listed):
        raise Refused
    for one in listed:
        if one != ANY:
            _check_sent_by_browsers(one)
    with suppress(ValueError):
        _check_sent_by_browsers(canonical_origin(origin))
        assert canonical_origin(canonical_origin(origin)) == canonical_origin(origin)
    origin, host = _in_header(origin), None if host is None else _in_header(host)
    hosts, is_listed = AllowedHosts.for_server("127.0.0.1", (ANY,)), ANY in listed or origin in listed
    scope = _scope({"host": host, "origin": origin, "sec-fetch-site": site})
    answer = asyncio.run(exchanged(with_cors(_answer, listed), scope))
    assert ("access-control-allow-origin" in answer.headers) == is_listed, "only pages of listed origins read it"
    if CrossSiteGuard(hosts, listed).refusal(scope) is None:
        assert is_listed or _is_same_origin(origin, host), f"{origin!r} is not listed"
        return
    assert not is_listed, f"{origin!r} is listed and refused"
    own = _origin_of(_split(origin))
    if own is not None and origin == f"http://{host}":
        assert _address(own[0]) is None and not NAME.fullmatch(own[0]), "its own page"
    raise Refused


def _check_sent_by_browsers(origin: str) -> None:
    """An origin that no browser sends in this spelling would be taken by the flag and allow nothing."""
    scheme, _, authority = origin.partition("://")
    assert origin.isascii() and origin.isprintable() and not re.search(r"[\s@/?#\\%]", authority), origin
    if scheme not in DEFAULT_PORTS:
        return
    parts = urlsplit(origin)
    host, port = parts.hostname or "", parts.port
    address = _address(host)
    assert authority == authority.lower() and port != DEFAULT_PORTS[scheme] and not authority.endswith(":"), origin
    assert port is None or authority.endswith(f":{port}"), origin
    assert address is not None or NAME.fullmatch(host), origin
    if isinstance(address, ipaddress.IPv6Address):
        assert host == address.compressed, origin


def _origin_cases() -> st.SearchStrategy[bytes]:
    scheme = st.sampled_from(["http://", "https://", "http://", "https://", "HTTP://", "tauri://", ""])
    port = st.sampled_from(["", ":8000", ":80", ":443", ":080", ".", ":"])
    authority = st.builds(lambda host, port: host + port, st.sampled_from(HOSTS), port)
    piece = st.sampled_from(HOSTS) | st.sampled_from(ORIGIN_PIECES) | st.text(max_size=3)
    origin = st.builds(lambda scheme, rest: scheme + rest, scheme, authority) | st.lists(piece, max_size=4).map("".join)
    site = st.sampled_from([None, "cross-site", "same-site", "same-origin", "none", "Cross-Site"])

    def build(first: str, second: str, host: str | None, site: str | None, how: int) -> bytes:
        """Origins that are listed, nearly listed and the server's own are most of the cases."""
        listed = [[], [first], [first], [second], ["*"]][how % 5]
        own = first.partition("://")[2] or None
        return _json(listed, first, own if how % 2 else host, site)

    return st.builds(build, origin, origin, st.none() | authority, site, st.integers(0, 9))


def _needs_no_preflight(content_type: str) -> bool:
    """Whether a page of another origin may send it without asking: Fetch, "CORS-safelisted request-header"."""
    if re.search(r'[\x00-\x08\x0a-\x1f"():<>?@\[\\\]{}\x7f]', content_type):
        return False
    essence = content_type.strip("\t\n\r ").partition(";")[0].rstrip("\t\n\r ").lower()
    return essence in NO_PREFLIGHT


def _media_types(data: bytes) -> None:
    """A body is read only where a page of another origin would have had to ask first."""
    path, content_type = json.loads(data)
    sent = _in_header(content_type)
    scope = _scope({"content-type": sent}) | {"path": path}
    if check_content_type(scope) is not None:
        assert sent.lower() != "application/json"
        raise Refused
    assert not _needs_no_preflight(sent), f"a page sends {sent!r} without asking"


def _media_type_cases() -> st.SearchStrategy[bytes]:
    piece = st.sampled_from(
        [
            *NO_PREFLIGHT, "application/json", "application/msgpack", "application/octet-stream", "application/x+json",
            "+json", "; charset=utf-8", ";", ",", " ", "\t", "\x0b", "\xa0", "text/", "json", "Application/JSON",
            "TEXT/Plain", "=",
        ]
    )  # fmt: skip
    text = st.lists(piece | st.text(max_size=2), max_size=4).map("".join)
    return st.builds(_json, st.sampled_from(["/v1/abort", "/internal/register"]), piece | text)


TARGETS = [
    Target("hosts", _host_cases(), _hosts, (Refused,)),
    Target("origins", _origin_cases(), _origins, (Refused,)),
    Target("media_types", _media_type_cases(), _media_types, (Refused,)),
]
