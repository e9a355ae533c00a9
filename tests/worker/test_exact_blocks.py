"""Weights in blocks: a row's logits have the same bits on every path that computes them, whatever its matrices' formats."""

import numpy as np
import pytest

from onward.kernels.weight_formats import FORMATS, format_of_record
from onward.models.tensor_names import expected_tensors
from onward.proto.model import ModelConfig
from tests.kernels.exact_bits import differing
from tests.worker.block_models import CONFIG, EXPERTS, arrays, block_formats
from tests.worker.driver import Driver, prepared
from tests.worker.exact_int8 import PATHS, one_at_a_time, tokens


def _driver(config: ModelConfig) -> Driver:
    return Driver(
        prepared(config, quantization="int8"), arrays(config), num_kv_blocks=512, max_num_seqs=256,
        max_num_batched_tokens=256, max_model_len=512, threads=2,
    )  # fmt: skip


@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_no_element_of_the_logits_differs_on_any_path_with_weights_of_every_format(config: ModelConfig) -> None:
    assert set(block_formats(config).values()) == set(FORMATS)
    driver, token_ids = _driver(config), tokens(149)
    alone = one_at_a_time(driver, token_ids)
    assert np.isfinite(alone).all()
    assert np.unique(alone).size > alone.size // 2, "logits that are all alike would prove nothing"
    assert {name: differing(path(driver, token_ids), alone) for name, path in PATHS.items()} == dict.fromkeys(PATHS, 0)


def test_experts_are_stored_in_every_format() -> None:
    stored = {
        name: format_of_record(array.shape[-1]).name for name, array in arrays(EXPERTS).items() if array.ndim == 3
    }
    assert {kind for name, kind in stored.items() if ".experts." in name} == set(FORMATS)


def test_every_matrix_is_stored_in_its_own_format() -> None:
    stored = {name: format_of_record(array.shape[-1]).name for name, array in arrays().items() if array.ndim == 3}
    formats = block_formats()
    for layer in range(CONFIG.num_layers):
        prefix, ours = f"model.layers.{layer}.", f"layers.{layer}."
        qkv = [formats[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"]
        assert [stored[ours + name] for name in ("qkv", "qkv.1", "qkv.2")] == qkv
        assert stored[ours + "o"] == formats[prefix + "self_attn.o_proj.weight"]
        assert stored[ours + "gate_up"] == formats[prefix + "mlp.up_proj.weight"]
        assert stored[ours + "down"] == formats[prefix + "mlp.down_proj.weight"]
    assert [stored["embed"], stored["head"]] == [formats["model.embed_tokens.weight"], formats["lm_head.weight"]]
    assert len(expected_tensors(CONFIG)) > 20
