"""Servers that draft, as real processes: what clients get is what a server without drafts says, in fewer steps."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.pd_instances import SMALL, Pair, total
from tests.e2e.server import Server
from tests.e2e.streams import Stream, run_streams
from tests.e2e.test_pd_serving import make_key

MODEL = "smollm2-135m-instruct"
TEXT = "apple, banana, cherry, date, elderberry, fig, grape, "
DRAFTS = ("--speculative", "ngram:4")
PATH = "/v1/completions"
full = pytest.mark.full


def body(index: int, **fields: Any) -> dict[str, Any]:
    """A request to repeat a list, which is easy to draft."""
    prompt = f"{index}: {TEXT}{TEXT}{TEXT}apple, banana,"
    sampled = {"temperature": 0} if index % 2 else {"temperature": 0.5, "seed": index}
    return {"model": MODEL, "prompt": prompt, "max_tokens": 48, "ignore_eos": True} | sampled | fields


BODIES = [body(index) for index in range(8)]


@pytest.fixture(scope="module")
def expected() -> list[tuple]:
    with Server(*SMALL) as plain:
        return [stream.result() for stream in run_streams(plain.url, BODIES, path=PATH)]


@pytest.fixture(scope="module", params=["shm", pytest.param("zmq", marks=full)])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(*SMALL, *DRAFTS, "--transport", request.param) as server:
        yield server


def test_streams_equal_those_without_drafts(server: Server, expected: list[tuple]) -> None:
    for bodies in (BODIES, BODIES[:1]):
        streams = run_streams(server.url, bodies, path=PATH)
        assert [stream.result() for stream in streams] == expected[: len(bodies)]
    assert total(server, "onward_spec_accepted_tokens_total") > 0
    assert total(server, "onward_spec_drafted_tokens_total") >= total(server, "onward_spec_accepted_tokens_total")


def test_an_answer_tells_what_became_of_its_drafts_if_it_is_asked_to(server: Server) -> None:
    status, answer = server.post(PATH, body(1, return_speculative_stats=True))
    assert status == 200
    stats = answer["usage"]["speculative"]
    assert stats["num_accepted_tokens"] > 0
    assert stats["acceptance_rate"] == stats["num_accepted_tokens"] / stats["num_draft_tokens"]
    assert stats["mean_accepted_length"] > 1
    assert len(stats["acceptance_rate_per_position"]) <= 4
    _, silent = server.post(PATH, body(1))
    assert "speculative" not in silent["usage"]


def test_a_request_may_do_without_drafts(server: Server) -> None:
    before = total(server, "onward_spec_drafted_tokens_total")
    wish = {"speculative": {"num_draft_tokens": 0}, "return_speculative_stats": True}
    _, answer = server.post(PATH, body(1, **wish))
    assert answer["usage"]["speculative"]["num_draft_tokens"] == 0
    assert total(server, "onward_spec_drafted_tokens_total") == before


@pytest.mark.parametrize("role", ["worker", pytest.param("engine", marks=full)])
def test_streams_go_on_when_a_process_is_killed_in_mid_draft(server: Server, expected: list[tuple], role: str) -> None:
    pids = [server.pid(role)]

    def kill(streams: list[Stream]) -> None:
        if pids and sum(len(stream.token_ids) for stream in streams) > 60:
            os.kill(pids.pop(), signal.SIGKILL)

    streams = run_streams(server.url, BODIES, kill, path=PATH)
    assert not pids, "the kill never came"
    assert [stream.result() for stream in streams] == expected


@full
@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_preempted_streams_equal_those_without_drafts(expected: list[tuple], transport: str) -> None:
    with Server(*SMALL, *DRAFTS, "--transport", transport, "--num-kv-blocks", "16") as small:
        streams = run_streams(small.url, BODIES, path=PATH)
        assert small.metrics()["onward_preemptions_total"] > 0
    assert [stream.result() for stream in streams] == expected


@pytest.mark.parametrize("backend", ["shm", pytest.param("tcp", marks=full), pytest.param("nixl", marks=full)])
def test_a_pair_that_drafts_says_the_same(
    expected: list[tuple], backend: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    key = () if backend == "shm" else ("--cluster-key-file", str(make_key(tmp_path_factory.mktemp("pd") / "key")))
    with Pair(*key, *DRAFTS, decode=("--local-prefill-tokens", "0", "--kv-backend", backend)) as pair:
        streams = run_streams(pair.decode.url, BODIES, path=PATH)
        assert [stream.result() for stream in streams] == expected
        assert total(pair.decode, "onward_spec_accepted_tokens_total") > 0
        pair.wait_until_at_rest()
