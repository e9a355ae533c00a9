"""The worker is killed partway through each kind of request that keeps state in it: the result is that of a quiet run."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.pd_instances import total, wait_for
from tests.e2e.server import Server
from tests.e2e.streams import TOPICS, chat_body, run_streams

MODEL = "smollm2-135m-instruct"
LONG_TEXT = " and ".join(f"{TOPICS[i % len(TOPICS)]} {i}" for i in range(60))
SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 60}, "year": {"type": "integer"}},
    "required": ["title", "year"],
    "additionalProperties": False,
}
GRAMMAR = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Make up a book about rivers, as JSON."}],
    "max_tokens": 60,
    "temperature": 1.0,
    "seed": 3,
    "response_format": {"type": "json_schema", "json_schema": {"name": "book", "schema": SCHEMA, "strict": True}},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mean pool": ("/v1/embeddings", {"model": MODEL, "input": LONG_TEXT, "pooling": "mean"}),
    "last row": ("/v1/embeddings", {"model": MODEL, "input": LONG_TEXT, "pooling": "last"}),
    "rerank": ("/v1/rerank", {"model": MODEL, "query": "rivers", "documents": [LONG_TEXT, "rivers"]}),
    "score": ("/v1/score", {"model": MODEL, "text_1": "rivers", "text_2": [LONG_TEXT, "rivers"]}),
    "prompt logprobs": (
        "/v1/completions",
        {"model": MODEL, "prompt": LONG_TEXT, "prompt_logprobs": 2, "max_tokens": 4, "temperature": 0.0},
    ),
    "grammar": ("/v1/chat/completions", GRAMMAR),
    "drafts": ("/v1/chat/completions", chat_body(1, 60)),
    "penalties": ("/v1/chat/completions", chat_body(2, 60, presence_penalty=0.8, frequency_penalty=0.5)),
}
STEPS_BEFORE_KILL = 4
"""Steps of 16 tokens at most: each of these requests takes more than twice as many."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Room for three or four of the streams below, which push each other out."""
    flags = ("--max-num-seqs", "8", "--max-num-batched-tokens", "16", "--speculative", "ngram:4")
    with Server(*flags, "--max-model-len", "512", "--num-kv-blocks", "40") as server:
        yield server


def answer(server: Server, name: str, salt: str) -> Any:
    """Without what differs between two answers to the same request. The salt keeps blocks that
    another request has cached out of it."""
    path, body = CASES[name]
    status, content = server.post(path, body | {"cache_salt": f"{name}, {salt}"})
    assert status == 200, content
    return {key: content.get(key) for key in ("data", "results", "choices", "prompt_logprobs")}


def kill_worker(server: Server, restarts: int) -> None:
    os.kill(server.pid("worker"), signal.SIGKILL)
    wait_for(lambda: server.get("/info")["restarts"]["worker"] > restarts, "another worker")


@pytest.mark.parametrize("name", CASES)
def test_a_request_whose_worker_is_killed_partway_has_the_result_of_a_quiet_run(server: Server, name: str) -> None:
    undisturbed = answer(server, name, "quiet")
    restarts, steps = server.get("/info")["restarts"]["worker"], total(server, "onward_steps_total")
    with ThreadPoolExecutor(1) as beside:
        disturbed = beside.submit(answer, server, name, "killed")
        wait_for(lambda: total(server, "onward_steps_total") >= steps + STEPS_BEFORE_KILL, "steps of the request")
        assert not disturbed.done(), "killed partway"
        kill_worker(server, restarts)
        assert disturbed.result() == undisturbed
    assert "keeps_memory=True" in server.log()


def test_streams_that_preempt_each_other_are_exact_when_their_worker_is_killed(server: Server) -> None:
    bodies = [chat_body(index, 90) for index in range(8)]
    undisturbed = [stream.result() for stream in run_streams(server.url, bodies)]
    restarts = server.get("/info")["restarts"]["worker"]
    before = total(server, "onward_preemptions_total")
    with ThreadPoolExecutor(1) as beside:
        streams = beside.submit(run_streams, server.url, [body | {"cache_salt": "killed"} for body in bodies])
        wait_for(lambda: total(server, "onward_preemptions_total") > before, "a preemption")
        assert not streams.done(), "killed partway"
        kill_worker(server, restarts)
        assert [stream.result() for stream in streams.result()] == undisturbed
