"""`onward.client` and the TypeScript client's protocol against real servers whose processes are killed while streams run.

Every stream is compared with what the same request got undisturbed.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from onward.client import AsyncResumingClient, ResumeOptions
from tests.e2e.answers import chat, completion, generate, seeded
from tests.e2e.cluster import SMALL, Cluster
from tests.e2e.server import Server

MAX_TOKENS = 96
PATIENT = ResumeOptions(first_delay_s=0.1, max_delay_s=1.0, max_failures=400, deadline_s=240)
RESPONSE = {"model": "smollm2-135m-instruct", "input": "Tell me something about salt.", "max_output_tokens": MAX_TOKENS}
QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    *(
        (question.path, question.body)
        for question in (
            chat("chat", 1, MAX_TOKENS, temperature=0.0),
            chat("chat, two choices", 2, MAX_TOKENS, n=2, **seeded(5)),
            completion("completions", 3, MAX_TOKENS, **seeded(6)),
            generate("generate", 4, MAX_TOKENS, **seeded(7)),
        )
    ),
    ("/v1/responses", RESPONSE | {"ignore_eos": True, "temperature": 0.0}),
]
Disturb = Callable[[], None]


class Stream:
    """What one client has read."""

    def __init__(self) -> None:
        self.pieces: dict[int, list[Any]] = {}
        self.ids: set[str] = set()
        self.num_events = 0

    def take(self, event: dict[str, Any]) -> None:
        self.num_events += 1
        if "id" in event:
            self.ids.add(event["id"])
        if "sequence_number" in event:
            assert event["sequence_number"] == self.num_events - 1, "the events of a response are numbered"
            self.pieces.setdefault(0, []).append(event.get("delta", ""))
        for choice in event.get("choices", []):
            piece = choice.get("token_ids") or choice.get("text") or choice.get("delta", {}).get("content")
            self.pieces.setdefault(choice["index"], []).extend(piece or "")

    def result(self) -> dict[int, str]:
        assert len(self.ids) <= 1, "one stream has one id"
        return {index: "".join(map(str, pieces)) for index, pieces in sorted(self.pieces.items())}


def read_all(url: str, disturb: Disturb | None = None, salt: str = "none") -> tuple[list[dict[int, str]], list[int]]:
    """Reads all streams at once, and disturbs them once each has 8 events. Also the numbers of the later connections."""
    streams, resumes = [Stream() for _ in QUESTIONS], list[int]()

    async def read(client: AsyncResumingClient, stream: Stream, path: str, body: dict[str, Any]) -> None:
        async for event in client.stream(path, body | {"cache_salt": salt}):
            stream.take(event)

    async def run() -> None:
        on_resume = lambda pause_s, number: resumes.append(number)  # noqa: E731
        async with (
            AsyncResumingClient(url, options=PATIENT, on_resume=on_resume) as client,
            asyncio.TaskGroup() as group,
        ):
            for stream, (path, body) in zip(streams, QUESTIONS, strict=True):
                group.create_task(read(client, stream, path, body))
            if disturb is not None:
                while min(stream.num_events for stream in streams) < 8:
                    await asyncio.sleep(0.005)
                await asyncio.to_thread(disturb)

    asyncio.run(run())
    return [stream.result() for stream in streams], resumes


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*SMALL) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: Server) -> list[dict[int, str]]:
    return read_all(server.url)[0]


@pytest.mark.parametrize("role", ["worker", "engine", "api"])
def test_streams_are_whole_when_a_process_of_the_server_is_killed(
    server: Server, expected: list[dict[int, str]], role: str
) -> None:
    streams, resumes = read_all(server.url, lambda: os.kill(server.pid(role), signal.SIGKILL), salt=role)
    assert streams == expected
    assert bool(resumes) == (role == "api"), "the server hides the others from its clients"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(prefill=(), decode=(), mixed=((), ())) as cluster:
        yield cluster


def test_streams_are_whole_when_the_router_is_killed_and_comes_back(
    cluster: Cluster, expected: list[dict[int, str]]
) -> None:
    def disturb() -> None:
        cluster.router.kill()
        cluster.router.start_again()

    streams, resumes = read_all(cluster.url, disturb, salt="router")
    assert streams == expected
    assert len(resumes) >= len(QUESTIONS)
    cluster.wait_until_ready()


def test_streams_are_whole_when_an_instance_and_then_the_router_are_killed(
    cluster: Cluster, expected: list[dict[int, str]]
) -> None:
    def disturb() -> None:
        cluster.with_stream(1).kill("instance")
        cluster.router.kill()
        cluster.router.start_again()

    assert read_all(cluster.url, disturb, salt="both")[0] == expected
    cluster.heal()
