"""A worker or the engine is killed during a stream of Ollama's API: its lines say what those of a quiet run say."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.api.ollama.reading import CHAT, GENERATE, built, lines_of
from tests.e2e.server import Server

MODEL = "smollm2-135m-instruct"
LINES_BEFORE_KILL = 5
OPTIONS = {"num_predict": 60, "seed": 7, "temperature": 1.0}
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 30}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": "Tell me a story about a lighthouse."}]}),
    "format": (CHAT, {"messages": [{"role": "user", "content": "Write some numbers."}], "format": NUMBERS}),
    "raw": (GENERATE, {"prompt": "Once upon a time", "raw": True}),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--max-model-len", "512") as server:
        yield server


def answer(server: Server, name: str, salt: str, kill: str | None = None) -> dict[str, Any]:
    """What the lines say. `kill`: the process that is killed after a few of them."""
    path, fields = BODIES[name]
    body = {"model": MODEL, "options": OPTIONS, "cache_salt": salt, **fields}
    received = b""
    with httpx.stream("POST", server.url + path, json=body, timeout=120) as stream:
        assert stream.status_code == 200
        for part in stream.iter_raw():
            received += part
            if kill is not None and received.count(b"\n") >= LINES_BEFORE_KILL:
                assert not msgspec.json.decode(received.splitlines()[-1])["done"], "killed partway"
                os.kill(server.pid(kill), signal.SIGKILL)
                kill = None
    assert kill is None, "the process was killed"
    return built(lines_of(received))


@pytest.mark.parametrize("process", ["worker", "engine"])
@pytest.mark.parametrize("name", BODIES)
def test_a_stream_whose_process_is_killed_says_what_a_quiet_one_says(server: Server, name: str, process: str) -> None:
    quiet = answer(server, name, f"quiet, {process}")
    assert answer(server, name, f"killed, {process}", process) == quiet
    assert server.get("/info")["restarts"][process] > 0
