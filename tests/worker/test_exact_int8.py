"""int8 on the CPU: a row's logits have the same bits on every path that computes them, for every shape of head.

What is counted is elements that differ, and the count must be zero.
"""

import numpy as np
import pytest

from onward.proto.model import Experts, ModelConfig
from tests.kernels.exact_bits import differing
from tests.worker.exact_int8 import (
    GROUP_SIZES,
    HEAD_SIZES,
    PATHS,
    VOCAB,
    in_chunks,
    new_driver,
    one_at_a_time,
    shape,
    tokens,
)

LENGTH = 149
CONTEXT = 2048


def _differing_by_path(config: ModelConfig, token_ids: list[int], *, is_grid: bool = False) -> dict[str, int]:
    driver = new_driver(config, is_grid=is_grid)
    alone = one_at_a_time(driver, token_ids)
    assert np.unique(alone).size > alone.size // 2, "logits that are all alike would prove nothing"
    return {name: differing(path(driver, token_ids), alone) for name, path in PATHS.items()}


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_no_element_of_the_logits_differs_on_any_path_for_any_shape_of_head(head_dim: int, group_size: int) -> None:
    assert _differing_by_path(shape(head_dim, group_size), tokens(LENGTH)) == dict.fromkeys(PATHS, 0)


@pytest.mark.parametrize(
    ("changes", "is_grid"),
    [
        ({"architecture": "qwen3", "qk_norm": True}, False),
        ({"architecture": "qwen2", "qkv_bias": True}, False),
        ({"tie_word_embeddings": False}, True),
        ({"experts": Experts(num_experts=6, top_k=3, intermediate_size=96, shared_intermediate_size=64)}, False),
        ({"experts": Experts(8, 3, 64, scores="sigmoid", selection_bias=True, num_groups=4, top_groups=2)}, False),
        ({"experts": Experts(num_experts=17, top_k=4, intermediate_size=64, renormalize=True)}, True),
    ],
    ids=["qwen3", "qwen2-float-kv", "four-bit-weights", "experts", "grouped-experts", "four-bit-experts"],
)
def test_no_element_of_the_logits_differs_in_any_family_of_models(changes: dict, is_grid: bool) -> None:
    config = shape(64, 3, **changes)
    assert _differing_by_path(config, tokens(LENGTH), is_grid=is_grid) == dict.fromkeys(PATHS, 0)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_no_element_of_the_logits_differs_up_to_the_end_of_the_context(head_dim: int, group_size: int) -> None:
    driver = new_driver(
        shape(head_dim, group_size, num_layers=1), max_rows=CONTEXT, max_model_len=CONTEXT, num_kv_blocks=320
    )
    token_ids = tokens(CONTEXT)
    alone = one_at_a_time(driver, token_ids)
    paths = (in_chunks(CONTEXT), in_chunks(192), in_chunks(511, 1, 129))
    assert alone.shape == (CONTEXT, VOCAB)
    assert [differing(path(driver, token_ids), alone) for path in paths] == [0, 0, 0]
