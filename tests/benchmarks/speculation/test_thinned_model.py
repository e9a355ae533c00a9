"""A copy with layers left out is a checkpoint like any other, with the other layers as they were."""

import functools
from pathlib import Path

import numpy as np
import pytest

from benchmarks.speculation.thinned_model import write_thinned
from onward.models.loader.model_store import prepare
from onward.models.loader.weights import open_weights
from onward.models.thinned import all_but_every_nth, every_nth
from tests.models.checkpoints import random_tensors, tiny_config, write_folder


def test_which_layers_stay() -> None:
    assert every_nth(30, 3) == [0, 3, 6, 9, 12, 15, 18, 21, 24, 27]
    assert set(range(30)) - set(all_but_every_nth(30, 10)) == {5, 15, 25}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_copy_has_the_kept_layers_and_all_that_is_no_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "cache"))
    config = tiny_config(architecture, num_layers=5, tie_word_embeddings=architecture == "qwen3")
    tensors = random_tensors(config)
    source = write_folder(tmp_path / "whole", config, tensors)
    written = write_thinned(str(source), tmp_path / "thin", functools.partial(every_nth, n=2))
    model = prepare(str(tmp_path / "thin"))
    assert model.config == written
    assert written.num_layers == 3
    for name, array in open_weights(model).items():
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(2 * int(parts[2]))
        np.testing.assert_array_equal(array, tensors[".".join(parts)])
