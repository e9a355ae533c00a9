"""`onward serve --device cuda --tensor-parallel 2`, with both ranks on one device: tokens are those of one rank, and
streams survive the end of a rank."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onward.bench.model_shapes import SHAPES, write_checkpoint, write_tokenizer
from tests.e2e.server import Server
from tests.e2e.streams import Stream, run_streams

pytestmark = pytest.mark.gpu

SHAPE, PATH = "qwen3-0.6b", "/v1/completions"
NUM_TOKENS = 200
BODIES: list[dict[str, Any]] = [
    {
        "model": "m", "prompt": [(i * 31 + j * j) % 4096 for j in range(5 + 60 * i)], "max_tokens": NUM_TOKENS,
        "ignore_eos": True, "temperature": 0,
    }
    for i in range(6)
]  # fmt: skip
RANKS = ("--tensor-parallel", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, SHAPE)
    write_tokenizer(folder, SHAPES[SHAPE]["vocab_size"])
    return folder


def serve(folder: Path, *flags: str) -> Server:
    sizes = ("--max-num-seqs", "16", "--num-kv-blocks", "2000", "--max-num-batched-tokens", "2048")
    return Server(str(folder), "--device", "cuda", "--served-model-name", "m", *sizes, *flags)


@pytest.fixture(scope="module")
def exact(folder: Path) -> Iterator[Server]:
    with serve(folder, "--deterministic", *RANKS) as server:
        yield server


def results(server: Server) -> list[tuple]:
    return [stream.result() for stream in run_streams(server.url, BODIES, path=PATH)]


def test_float32_tokens_of_two_ranks_are_those_of_one(folder: Path) -> None:
    flags = ("--dtype", "float32", "--no-deterministic")
    with serve(folder, *flags) as one:
        expected = results(one)
    with serve(folder, *flags, *RANKS) as two:
        assert results(two) == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_streams_continue_equally_when_a_rank_is_killed(exact: Server, rank: int) -> None:
    undisturbed = results(exact)
    pids = [one["pid"] for one in exact.get("/info")["processes"] if one.get("rank") == rank]

    def kill(streams: list[Stream]) -> None:
        if pids and min(len(stream.token_ids) for stream in streams) >= 20:
            os.kill(pids.pop(), signal.SIGKILL)

    streams = run_streams(exact.url, BODIES, kill, path=PATH)
    assert not pids, "the rank was killed before the streams had ended"
    assert [stream.result() for stream in streams] == undisturbed
