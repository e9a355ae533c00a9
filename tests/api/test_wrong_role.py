"""A prefill instance explains itself to clients, and is otherwise a server like any other."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from onward.api.endpoints.attempts import WrongRoleEndpoint
from onward.config import ApiConfig
from onward.proto.model import PreparedModel
from tests.api.instance import Instance, running
from tests.api.reader import PATHS, request


@pytest.fixture(scope="module")
def prefill(model: PreparedModel) -> Iterator[Instance]:
    with running(model, ApiConfig(role="prefill", max_body_bytes=1 << 16)) as instance:
        yield instance


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_prefill_instance_generates_for_nobody_and_says_where_to_go(
    prefill: Instance, path: str, streaming: bool
) -> None:
    with httpx.Client(base_url=prefill.url, timeout=30) as http:
        bodies = [b"{", b"", b"x" * (1 << 20)]
        answers = [http.post(path, json=request(path, streaming)), *(http.post(path, content=one) for one in bodies)]
        ports = {one.extensions["network_stream"].get_extra_info("client_addr") for one in answers}
    assert len(ports) == 1 and None not in ports, "the connection stays usable, whatever was sent"
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["retryable"]) == (400, "wrong_role", False)
        assert "prefill" in error["message"] and "decode or mixed instance" in error["message"]
    assert not prefill.engine.submits


def test_the_explanation_follows_the_body_since_clients_that_still_write_would_hang_up() -> None:
    exchange: list[str] = []
    parts = iter([{"type": "http.request", "body": b"x" * 1000, "more_body": more} for more in (True, True, False)])

    async def receive() -> Any:
        exchange.append("part")
        return next(parts)

    async def send(message: Any) -> None:
        exchange.append(message["type"])

    asyncio.run(WrongRoleEndpoint()({"type": "http"}, receive, send))
    assert exchange == ["part"] * 3 + ["http.response.start", "http.response.body"]


def test_the_other_routes_of_a_prefill_instance_work(prefill: Instance) -> None:
    for path in ("/health", "/live", "/metrics", "/v1/models", "/version"):
        assert httpx.get(prefill.url + path).status_code == 200
    assert httpx.post(f"{prefill.url}/v1/abort", json={"all": True}).json() == {"aborted": [], "unknown": []}
    assert httpx.get(f"{prefill.url}/info").json()["role"] == "prefill"


def test_a_decode_instance_generates(model: PreparedModel) -> None:
    with running(model, ApiConfig(role="decode")) as instance:
        for path in PATHS:
            assert httpx.post(instance.url + path, json=request(path, False, max_tokens=2)).status_code == 200
        assert httpx.get(f"{instance.url}/info").json()["role"] == "decode"
