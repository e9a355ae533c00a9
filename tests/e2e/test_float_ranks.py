"""A float model on several ranks, each with a part of its weights: its streams survive the end of any rank."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from onward.bench.model_shapes import write_tokenizer
from tests.e2e.cluster import SMALL
from tests.e2e.pd_instances import wait_for
from tests.e2e.server import Server
from tests.e2e.streams import Stream, run_streams
from tests.models.checkpoints import tiny_config, write_folder
from tests.worker.cuda.small_model import random_weights

CONFIG = tiny_config(
    "qwen3", vocab_size=320, hidden_size=128, intermediate_size=224, num_layers=3, num_heads=6, num_kv_heads=3,
    head_dim=128, max_position_embeddings=512,
)  # fmt: skip
PATH = "/v1/completions"
NUM_TOKENS = 120


def _body(index: int) -> dict[str, Any]:
    prompt = np.random.default_rng(index).integers(0, CONFIG.vocab_size, 20 + 30 * index).tolist()
    return {"model": "served", "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}


BODIES = [_body(index) for index in range(3)]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = write_folder(tmp_path_factory.mktemp("models") / "served", CONFIG, dict(random_weights(CONFIG)))
    write_tokenizer(folder, CONFIG.vocab_size)
    return (str(folder), "--served-model-name", "served", "--quantization", "none", *SMALL)


@pytest.fixture(scope="module")
def server(flags: tuple[str, ...]) -> Iterator[Server]:
    with Server(*flags, "--tensor-parallel", "2", "--stopped-timeout-s", "1") as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[tuple]:
    return [stream.result() for stream in run_streams(server.url, BODIES, path=PATH)]


def _ranks(server: Server) -> dict[int, int]:
    return {one["rank"]: one["pid"] for one in server.get("/info")["processes"] if "rank" in one}


@pytest.mark.parametrize(
    ("rank", "number", "cause"),
    [
        (1, signal.SIGKILL, "rank 1: signal 9"),
        pytest.param(0, signal.SIGKILL, "rank 0: signal 9", marks=pytest.mark.full),
        pytest.param(1, signal.SIGSTOP, "stopped by a signal", marks=pytest.mark.full),
    ],
    ids=["kill-1", "kill-0", "stop-1"],
)
def test_streams_continue_equally_when_a_rank_is_killed_or_stopped(
    server: Server, undisturbed: list[tuple], rank: int, number: signal.Signals, cause: str
) -> None:
    pids, before = _ranks(server), server.get("/info")["restarts"]["worker"]
    assert sorted(pids) == [0, 1]
    victims = [pids[rank]]

    def kill(streams: list[Stream]) -> None:
        if victims and sum(len(stream.token_ids) for stream in streams) > 60:
            os.kill(victims.pop(), number)

    streams = run_streams(server.url, BODIES, kill, path=PATH)
    assert not victims, "the rank was disturbed before the streams had ended"
    assert [stream.result() for stream in streams] == undisturbed
    wait_for(lambda: server.get("/info")["restarts"]["worker"] == before + 1, "the group that replaces it")
    assert cause in server.log(), "the other rank has not left by itself"
    recomputed = server.metrics()['onward_recomputed_tokens_total{cause="worker"}']
    assert recomputed <= 4 * len(BODIES) * (before + 1), "KV is kept"


@pytest.mark.full
def test_greedy_streams_of_two_ranks_are_those_of_one(flags: tuple[str, ...], undisturbed: list[tuple]) -> None:
    with Server(*flags) as one_rank:
        assert [stream.result() for stream in run_streams(one_rank.url, BODIES, path=PATH)] == undisturbed
