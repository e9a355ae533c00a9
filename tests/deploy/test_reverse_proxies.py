"""The nginx and Envoy examples: what they let through, and how long they wait."""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from onward.proto.router import ATTEMPT_PATH, REGISTER_PATH
from tests.deploy.manifests import DEPLOY

LONG_S = 3600
"""The clients' deadline. An answer that is not streamed is silent until it is complete."""
ENVOY: dict[str, Any] = yaml.safe_load((DEPLOY / "envoy" / "envoy.yaml").read_text())
NGINX = (DEPLOY / "nginx" / "nginx.conf").read_text()


def connection_manager() -> dict[str, Any]:
    [listener] = ENVOY["static_resources"]["listeners"]
    return listener["filter_chains"][0]["filters"][0]["typed_config"]


def seconds(duration: str) -> int:
    return int(duration.removesuffix("s"))


def routes() -> list[dict[str, Any]]:
    [host] = connection_manager()["route_config"]["virtual_hosts"]
    return host["routes"]


def is_blocked(path: str) -> bool:
    """By the first route that matches, as Envoy does: on the path as it was sent, percent-encodings included."""
    for route in routes():
        match route["match"]:
            case {"prefix": prefix} if path.startswith(prefix):
                return "direct_response" in route
            case {"path": whole} if path == whole:
                return "direct_response" in route
            case {"safe_regex": {"regex": regex}} if re.fullmatch(regex, path):
                return "direct_response" in route
            case _:
                pass
    return True


def encodings(path: str) -> Iterator[str]:
    """The path with each single character percent-encoded, in both spellings, and with all of them."""
    codes = [f"%{ord(letter):02x}" for letter in path]
    for at in range(1, len(path)):
        yield path[:at] + codes[at] + path[at + 1 :]
        yield path[:at] + codes[at].upper() + path[at + 1 :]
    yield "/" + "".join(codes[1:])


@pytest.mark.parametrize("path", ["/internal/status", "/metrics", ATTEMPT_PATH, REGISTER_PATH])
def test_envoy_blocks_the_clusters_paths_however_they_are_encoded(path: str) -> None:
    """The server decodes percent-encodings before it looks for a route, so each of these would reach the path."""
    assert is_blocked(path)
    for encoded in encodings(path):
        assert unquote(encoded) == path
        assert is_blocked(encoded), encoded


def test_envoy_lets_requests_of_clients_through() -> None:
    for path in ("/", "/v1/chat/completions", "/v1/models/org%2Fmodel", "/health", "/docs", "/ui", "/tokenize"):
        assert not is_blocked(path), path


def test_an_answer_that_is_not_streamed_has_an_hour() -> None:
    manager = connection_manager()
    assert seconds(manager["stream_idle_timeout"]) >= LONG_S
    assert all(seconds(route["route"]["timeout"]) in (0, LONG_S) for route in routes() if "route" in route)
    [read] = re.findall(r"proxy_read_timeout (\d+)s;", NGINX)
    assert int(read) >= LONG_S


def test_a_server_that_is_gone_is_noticed_meanwhile() -> None:
    [cluster] = ENVOY["static_resources"]["clusters"]
    assert cluster["upstream_connection_options"]["tcp_keepalive"]["keepalive_time"] <= 60
    assert "proxy_socket_keepalive on;" in NGINX
