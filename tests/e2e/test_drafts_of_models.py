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

from onward.bench.shapes import write_tokenizer
from onward.bench.thinned_model import write_thinned
from onward.proto.model import ModelConfig
from tests.e2e.pd_instances import SMALL, Pair, total
from tests.e2e.server import Server
from tests.e2e.streams import Stream, run_streams
from tests.models.checkpoints import random_tensors, write_folder
from tests.worker import small_int8
from tests.worker.speculation.plain_eagle import random_head, write_head

CONFIG: ModelConfig = msgspec.structs.replace(
    small_int8.CONFIG, vocab_size=320, num_layers=24, max_position_embeddings=512
)
PATH = "/v1/completions"
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
    with Server(*_flags(folders, "draft:{}/draft:4")) as server:
        yield server


def test_streams_equal_plain_ones_and_nearly_all_drafts_are_right(drafting: Server, expected: list[tuple]) -> None:
    streams = run_streams(drafting.url, BODIES, path=PATH)
    assert [stream.result() for stream in streams] == expected
    drafted, accepted = (total(drafting, f"onward_spec_{kind}_tokens_total") for kind in ("drafted", "accepted"))
    assert accepted > 0
    assert accepted >= 0.9 * drafted


def test_streams_go_on_when_the_worker_is_killed_in_mid_draft(drafting: Server, expected: list[tuple]) -> None:
    pids = [drafting.pid("worker")]

    def kill(streams: list[Stream]) -> None:
        if pids and sum(len(stream.token_ids) for stream in streams) > 40:
            os.kill(pids.pop(), signal.SIGKILL)

    streams = run_streams(drafting.url, BODIES, kill, path=PATH)
    assert not pids, "the kill never came"
    assert [stream.result() for stream in streams] == expected


def test_a_layer_of_random_weights_drafts_and_changes_nothing(folders: Path, expected: list[tuple]) -> None:
    with Server(*_flags(folders, "eagle:{}/eagle:2")) as server:
        streams = run_streams(server.url, BODIES, path=PATH)
        assert [stream.result() for stream in streams] == expected
        assert total(server, "onward_spec_drafted_tokens_total") > 0


def test_a_wrong_path_is_told_at_the_start(folders: Path) -> None:
    with pytest.raises(AssertionError, match=r"--speculative draft:.*/nothing: no such model"):
        Server(*_flags(folders, "draft:{}/nothing:4"))


@full
def test_preempted_streams_equal_plain_ones(folders: Path) -> None:
    bodies = [_body(0) | {"seed": seed, "max_tokens": 120} for seed in range(3)]
    with Server(*_flags(folders)) as plain:
        expected = [stream.result() for stream in run_streams(plain.url, bodies, path=PATH)]
    with Server(*_flags(folders, "draft:{}/draft:4"), "--num-kv-blocks", "14") as small:
        streams = run_streams(small.url, bodies, path=PATH)
        assert small.metrics()["onward_preemptions_total"] > 0
        assert total(small, "onward_spec_accepted_tokens_total") > 0
    assert [stream.result() for stream in streams] == expected


@full
@pytest.mark.parametrize("speculative", ["draft:{}/draft:4", "eagle:{}/eagle:2"])
def test_a_pair_says_the_same(folders: Path, expected: list[tuple], speculative: str) -> None:
    """The prefill instance hands its guesses over; the decode instance, whose drafting model has no KV of the prompt,
    catches up with it, and its draft layer, which cannot, keeps silent."""
    with Pair(*_flags(folders, speculative)) as pair:
        streams = run_streams(pair.decode.url, BODIES, path=PATH)
        assert [stream.result() for stream in streams] == expected
        assert total(pair.decode, "onward_spec_drafted_tokens_total") > 0
        pair.wait_until_at_rest()
