"""Servers where a model or EAGLE's layer drafts, as real processes: what clients get is what a plain server says.

The served model has one layer that does anything, and the model that drafts is that layer: cheap and always right.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.speculation.thinned_model import write_thinned
from onward.bench.model_shapes import write_tokenizer
from onward.proto.model import ModelConfig
from tests.e2e.pd_instances import SMALL, Pair, backend_of, ended, total
from tests.e2e.server import Server
from tests.e2e.streams import Stream, run_streams
from tests.e2e.test_pd_serving import make_key
from tests.models.checkpoints import random_tensors, write_folder
from tests.worker import small_int8
from tests.worker.speculation.plain_eagle import random_head, write_head

CONFIG: ModelConfig = msgspec.structs.replace(
    small_int8.CONFIG, vocab_size=320, num_layers=24, max_position_embeddings=512
)
PATH = "/v1/completions"
DRAFT, EAGLE = "draft:{}/draft:4", "eagle:{}/eagle:2"
full = pytest.mark.full


def _body(index: int) -> dict[str, Any]:
    prompt = np.random.default_rng(index).integers(0, CONFIG.vocab_size, 20 + 30 * index).tolist()
    sampled = {"temperature": 0} if index % 2 else {"temperature": 1.5, "seed": index, "repetition_penalty": 1.1}
    return {"model": "served", "prompt": prompt, "max_tokens": 40, "ignore_eos": True} | sampled


BODIES = [_body(index) for index in range(3)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`served`, `draft` and `eagle`."""
    root = tmp_path_factory.mktemp("models")
    tensors = random_tensors(CONFIG)
    for name, array in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) and not name.startswith("model.layers.0."):
            array[:] = 0
    write_folder(root / "served", CONFIG, tensors)
    write_tokenizer(root / "served", CONFIG.vocab_size)
    write_thinned(str(root / "served"), root / "draft", lambda num_layers: [0])
    one_layer = msgspec.structs.replace(CONFIG, num_layers=1)
    write_head(root / "eagle", one_layer, random_head(one_layer))
    return root


def _flags(folders: Path, speculative: str | None = None) -> tuple[str, ...]:
    drafts = () if speculative is None else ("--speculative", speculative.format(folders))
    return (str(folders / "served"), "--served-model-name", "served", "--quantization", "int8", *SMALL, *drafts)


@pytest.fixture(scope="module")
def expected(folders: Path) -> list[tuple]:
    with Server(*_flags(folders)) as plain:
        return [stream.result() for stream in run_streams(plain.url, BODIES, path=PATH)]


@pytest.fixture(scope="module")
def drafting(folders: Path) -> Iterator[Server]:
    with Server(*_flags(folders, DRAFT)) as server:
        yield server


@pytest.fixture(scope="module")
def layered(folders: Path) -> Iterator[Server]:
    with Server(*_flags(folders, EAGLE)) as server:
        yield server


def _fates(server: Server) -> tuple[float, float]:
    """How many were drafted, and how many of them accepted, since the engine was born."""
    drafted, accepted = (total(server, f"onward_spec_{kind}_tokens_total") for kind in ("drafted", "accepted"))
    return drafted, accepted


def _kill_in_mid_stream(server: Server, role: str) -> list[tuple]:
    """What the streams say although a process dies. Drafts are made after that too: by the next stream for sure, since one
    whose drafts were wrong gives them up."""
    pids, known = [server.pid(role)], [0.0]

    def kill(streams: list[Stream]) -> None:
        if pids and sum(len(stream.token_ids) for stream in streams) > 40:
            os.kill(pids.pop(), signal.SIGKILL)
            if role == "worker":
                known.append(_fates(server)[0])  # an engine that is born anew counts from zero

    streams = run_streams(server.url, BODIES, kill, path=PATH)
    assert not pids, "the kill never came"
    run_streams(server.url, BODIES[:1], path=PATH)
    assert _fates(server)[0] > known[-1]
    return [stream.result() for stream in streams]


def test_streams_equal_plain_ones_and_drafts_are_right(drafting: Server, expected: list[tuple]) -> None:
    streams = run_streams(drafting.url, BODIES, path=PATH)
    assert [stream.result() for stream in streams] == expected
    drafted, accepted = _fates(drafting)
    assert accepted == drafted > 0


def test_a_layer_of_random_weights_drafts_and_changes_nothing(layered: Server, expected: list[tuple]) -> None:
    streams = run_streams(layered.url, BODIES, path=PATH)
    assert [stream.result() for stream in streams] == expected
    assert _fates(layered)[0] > 0


@pytest.mark.parametrize("role", ["worker", pytest.param("engine", marks=full)])
def test_streams_go_on_when_a_process_is_killed_in_mid_draft(
    drafting: Server, expected: list[tuple], role: str
) -> None:
    """And what the next one drafts, from tokens that it was given, is as right as it was."""
    assert _kill_in_mid_stream(drafting, role) == expected
    drafted, accepted = _fates(drafting)
    assert accepted == drafted


@pytest.mark.parametrize("role", ["worker", pytest.param("engine", marks=full)])
def test_streams_with_a_draft_layer_go_on_when_a_process_is_killed(
    layered: Server, expected: list[tuple], role: str
) -> None:
    assert _kill_in_mid_stream(layered, role) == expected


def test_a_wrong_path_is_told_at_the_start(folders: Path) -> None:
    with pytest.raises(AssertionError, match=r"--speculative draft:.*/nothing: no such model"):
        Server(*_flags(folders, "draft:{}/nothing:4"))


@full
def test_preempted_streams_equal_plain_ones(folders: Path) -> None:
    bodies = [_body(0) | {"seed": seed, "max_tokens": 120} for seed in range(3)]
    with Server(*_flags(folders)) as plain:
        expected = [stream.result() for stream in run_streams(plain.url, bodies, path=PATH)]
    with Server(*_flags(folders, DRAFT), "--num-kv-blocks", "14") as small:
        streams = run_streams(small.url, bodies, path=PATH)
        assert small.metrics()["onward_preemptions_total"] > 0
        drafted, accepted = _fates(small)
        assert accepted == drafted > 0
    assert [stream.result() for stream in streams] == expected


@full
@pytest.mark.parametrize("backend", ["shm", "tcp", "nixl"])
@pytest.mark.parametrize("speculative", [DRAFT, EAGLE])
def test_a_pair_says_the_same(
    folders: Path, expected: list[tuple], tmp_path: Path, speculative: str, backend: str
) -> None:
    """The prefill instance hands its guesses over; the decode instance, whose drafting model has no KV of the prompt,
    catches up with it, and its draft layer, which cannot, keeps silent."""
    key = () if backend == "shm" else ("--cluster-key-file", str(make_key(tmp_path / "key")))
    decode = ("--local-prefill-tokens", "0", "--kv-backend", backend)
    with Pair(*_flags(folders, speculative), *key, decode=decode) as pair:
        streams = run_streams(pair.decode.url, BODIES, path=PATH)
        assert [stream.result() for stream in streams] == expected
        drafted, accepted = _fates(pair.decode)
        assert drafted > 0
        if speculative == DRAFT:
            assert accepted == drafted
        assert backend_of(pair) == backend
        assert ended(pair.decode, "arrived") == len(BODIES)
        pair.wait_until_at_rest()
