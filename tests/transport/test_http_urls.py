"""URLs of servers: what can be connected to, and what is refused before anything tries."""

import pytest

from onward.transport.http_urls import parse_server_url

VALID = {
    "http://127.0.0.1:8000": "http://127.0.0.1:8000",
    "http://GPU-box.internal:1/": "http://gpu-box.internal:1",
    "https://[::1]:65535": "https://[::1]:65535",
    "http://node_3": "http://node_3",
    "http://host.:80": "http://host.:80",
    "http://b\u00fccher:5": "http://xn--bcher-kva:5",
}
INVALID = {
    "http://gpu-box..internal:23003": "label",
    "http://127.0.0.1:99999": "0-65535",
    "http://127.0.0.1:0": "1 to 65535",
    "http://127.0.0.1:": "1 to 65535",
    "http://127.0.0.1:x": "ort",
    "http://[::1": "IPv6",
    "http://[::1]x:1": "in brackets",
    "http://[fe80::1%eth0]:1": "in brackets",
    "http://[::g]:1": "IPv6",
    "http://0.0.0.0:1": "one host",
    "http://[::]:1": "one host",
    "http://:80": "name of a host",
    "http://": "name of a host",
    "a:8000": "http://",
    "ftp://a:1": "http://",
    "http://a b:1": "white space",
    "http://a\n:1": "white space",
    "http://a;b:1": "not the name of a host",
    "http://" + "a" * 64 + ":1": "label",
    "http://" + "a." * 130 + "a:1": "not the name of a host",
    "http://user@a:1": "more than a host",
    "http://a:1/path": "more than a host",
    "http://a:1?x": "more than a host",
}


@pytest.mark.parametrize("url", VALID)
def test_a_url_has_one_normal_form(url: str) -> None:
    assert str(parse_server_url(url)) == VALID[url]
    assert str(parse_server_url(VALID[url])) == VALID[url]


@pytest.mark.parametrize("url", INVALID)
def test_a_url_that_nothing_can_connect_to_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=INVALID[url]):
        parse_server_url(url)


def test_the_port_is_that_of_the_scheme_where_none_is_named() -> None:
    assert [parse_server_url(url).effective_port for url in ("http://a", "https://a", "https://a:7")] == [80, 443, 7]
