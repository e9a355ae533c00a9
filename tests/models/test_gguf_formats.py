"""Files that are written again in the usual GGUF formats."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks.cpu.gguf_formats import FORMATS, Kind, convert, quantize
from onward.config import DEFAULT_MODEL, cache_dir
from onward.models.loader.gguf_file import GgufFile
from onward.models.loader.model_sources import GgufSource
from onward.models.loader.model_store import prepare, resolve_source
from onward.models.loader.weights import open_weights
from tests.models.checkpoints import random_tensors, tiny_config, write_gguf

LARGEST_ERROR = {
    Kind.Q4_0: 0.13, Kind.Q5_0: 0.065, Kind.Q5_1: 0.04, Kind.Q8_0: 0.005, Kind.Q4_K: 0.08, Kind.Q5_K: 0.04,
    Kind.Q6_K: 0.035,
}  # fmt: skip
"""By type: of a weight, as a share of the largest in its row. Half a step, and what the rounding of scales adds."""


@pytest.mark.parametrize("kind", LARGEST_ERROR, ids=lambda kind: kind.name)
def test_a_quantized_row_is_close_to_the_weights(kind: Kind) -> None:
    values = np.random.default_rng(1).uniform(-1, 1, (16, 512)).astype(np.float32)
    values[3] = 0
    error = np.abs(gguf.dequantize(quantize(values, kind), kind) - values)
    assert error.max() < LARGEST_ERROR[kind]
    assert not error[3].any()


def test_a_converted_file_is_the_same_model_in_other_types(tmp_path: Path) -> None:
    config = tiny_config(hidden_size=96, intermediate_size=512, num_layers=8, num_heads=3, num_kv_heads=1, head_dim=32)
    fields = {"tokenizer.ggml.tokens": ["a", "b"], "general.name": "small", "tokenizer.ggml.add_bos_token": True}
    source = write_gguf(tmp_path / "source.gguf", config, random_tensors(config), fields=fields)
    before, after = GgufFile(source), GgufFile(convert(source, tmp_path / "target.gguf", "Q4_K_M"))
    assert after.config == before.config
    assert after.metadata == before.metadata
    kinds = {name: blocks.format_name for name, blocks in after.blocks.items()}
    assert [kinds[f"model.layers.{layer}.mlp.down_proj.weight"] for layer in range(8)] == [
        "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K",
    ]  # fmt: skip
    assert kinds["model.layers.1.mlp.up_proj.weight"] == "Q5_0", "rows of 96 have no super-blocks"
    assert kinds["model.embed_tokens.weight"] == "Q8_0"
    for name, array in before.items():
        assert np.abs(after[name] - array).max() <= 0.13 * np.abs(array).max(), name


@pytest.mark.full
@pytest.mark.parametrize("name", FORMATS)
def test_weights_take_no_more_memory_than_the_default_models_file_in_each_format(name: str, tmp_path: Path) -> None:
    source = resolve_source(DEFAULT_MODEL, with_weights=True, cache_dir=cache_dir(), progress=lambda *_: None)
    assert isinstance(source, GgufSource)
    file = convert(source.path, tmp_path / "model.gguf", name)
    weights = open_weights(prepare(str(file), cache_dir=tmp_path / "cache"))
    assert sum(np.asarray(array).nbytes for array in weights.values()) < file.stat().st_size
