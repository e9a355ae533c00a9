"""Every family on a real device, in bfloat16 and deterministic mode: close to the plain operations in float64, and exact
after a resume, in any batch and in chunks cut anywhere. Needs neither transformers nor a checkpoint.

    pytest -m gpu tests/worker/cuda/test_families_on_device.py
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from onward.kernels.ops import Scoring
from onward.proto.model import LayerKind, LinearRope, LongRope, ModelConfig
from onward.proto.step import RunSlot
from tests.worker.cuda.small_model import DeviceDriver, random_weights

pytestmark = pytest.mark.gpu

WINDOW, MAX_MODEL_LEN, LENGTH = 40, 512, 300
"""Windows begin in other tiles and splits than the rows that they belong to."""
LIMIT = 0.08
"""Largest error of all logits together, relative to them. A bfloat16 number is accurate to 0.004."""

PLAIN = ModelConfig(
    architecture="llama", vocab_size=1999, hidden_size=256, intermediate_size=512, num_layers=3, num_heads=8,
    num_kv_heads=2, head_dim=64, max_position_embeddings=MAX_MODEL_LEN, rms_norm_eps=1e-6, rope_theta=10_000.0,
)  # fmt: skip
SLIDES, FULL, LOCAL = LayerKind(window=WINDOW), LayerKind(), LayerKind(window=WINDOW, rope="local")
NO_ROPE = LayerKind(rope="none")
SCALES = tuple(1.0 + 0.05 * i for i in range(36))
GEMMA = {
    "norm_weight_offset": 1.0, "activation": "gelu_tanh", "embedding_multiplier": 16.0, "tie_word_embeddings": True,
}  # fmt: skip
GPT = {
    "norm": "layer", "norm_bias": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True, "gated_mlp": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama with biases and heads of 72": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "head_dim": 72},
    "mistral": {"head_dim": 128, "layers": (SLIDES,) * 3},
    "gemma": GEMMA | {"query_scale": 0.06},
    "gemma2": GEMMA | {
        "head_dim": 256, "post_norm": True, "layers": (SLIDES, FULL, SLIDES), "query_scale": 0.07,
        "attention_softcap": 20.0, "logit_softcap": 8.0,
    },
    "gemma3": GEMMA | {
        "post_norm": True, "layers": (LOCAL, FULL, LOCAL), "query_scale": 0.1, "qk_norm": True,
        "rope_scaling": LinearRope(4.0), "local_rope_theta": 1_000.0,
    },
    "phi3": {
        "head_dim": 96, "rotary_dim": 72, "layers": (SLIDES,) * 3, "rope_scaling": LongRope(SCALES, SCALES, 64, 1.2),
    },
    "olmo2": {"qk_norm": True, "qk_norm_is_whole": True, "pre_norm": False, "post_norm": True},
    "granite": {
        "query_scale": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_multiplier": 0.2,
    },
    "smollm3": {"layers": (FULL, NO_ROPE, FULL)},
    "gpt2": GPT | {"learned_positions": True, "activation": "gelu_tanh"},
    "gptneox": GPT | {"parallel_block": True, "activation": "gelu", "rotary_dim": 16},
    "sinks": {"attention_sinks": True, "layers": (SLIDES, FULL, SLIDES), "o_bias": True, "activation": "relu"},
}  # fmt: skip


def config_of(family: str) -> ModelConfig:
    return msgspec.structs.replace(PLAIN, **FAMILIES[family])


def weights_of(config: ModelConfig) -> dict[str, np.ndarray]:
    """As bfloat16 holds them. Biases and sinks are as large as what they are added to."""
    weights: dict[str, np.ndarray] = {}
    for name, array in random_weights(config).items():
        wide = array * np.float32(array.shape[-1] ** 0.5 / 3) if name.endswith(("bias", "sinks")) else array
        weights[name] = torch.from_numpy(wide).to(torch.bfloat16).float().numpy()
    return weights


SETTINGS: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 16, "num_kv_blocks": 400, "max_num_batched_tokens": 128,
}  # fmt: skip


def on_device(config: ModelConfig, *, deterministic: bool = True) -> DeviceDriver:
    from onward.kernels.triton.triton_ops import TritonOps

    ops = TritonOps(max_model_len=MAX_MODEL_LEN, fixed_order=deterministic)
    return DeviceDriver(
        config, ops=ops, device="cuda", dtype="bfloat16", weights=weights_of(config), deterministic=deterministic,
        **SETTINGS,
    )  # fmt: skip


def plain(config: ModelConfig) -> DeviceDriver:
    return DeviceDriver(config, dtype="float64", weights=weights_of(config), **SETTINGS)


def tokens(seed: int, count: int = LENGTH) -> list[int]:
    return np.random.default_rng(seed).integers(0, PLAIN.vocab_size, count).tolist()


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


WAYS = {
    "whole": [75] * 4,
    "odd chunks": [1, 17, 46, 1, 1, 64, 63, 64, 43],
    "many single tokens": [64, 64, 64] + [1] * 44 + [64],
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_close_to_float64_and_has_the_same_bits_in_any_chunks(family: str) -> None:
    config = config_of(family)
    driver = on_device(config)
    whole = driver.logits(0, tokens(1), WAYS["whole"])
    for name, chunks in WAYS.items():
        assert np.array_equal(driver.logits(1, tokens(1), chunks), whole), name
    assert error(whole, plain(config).logits(0, tokens(1), WAYS["whole"])) < LIMIT


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_samples_the_same_tokens_alone_in_a_batch_and_after_a_resume(family: str) -> None:
    """Decoding steps beside other ones, and steps that recompute what was generated as chunks of a prompt."""
    count, lengths = 24, (1, 39, 40, 41, 127, 160, 250)
    driver = on_device(config_of(family))
    prompts = [tokens(7 + i, length) for i, length in enumerate(lengths)]
    together = driver.generate([driver.assign(i, p, room=count) for i, p in enumerate(prompts)], count)
    for i, done in ((0, 0), (3, 0), (4, 5), (5, 13), (6, 23)):
        driver._open(driver.runner)  # its blocks are free again
        request = driver.assign(0, prompts[i] + together[i][:done], room=count)
        assert driver.generate([request], count - done)[0] == together[i][done:], (lengths[i], done)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt2", "sinks"])
def test_without_deterministic_mode_a_family_is_close_to_float64_too(family: str) -> None:
    """Prompts, and batches that decode: one row, and several."""
    config = config_of(family)
    driver, reference = on_device(config, deterministic=False), plain(config)
    assert error(*(d.logits(0, tokens(1), WAYS["odd chunks"]) for d in (driver, reference))) < LIMIT
    for count in (1, 5):
        for d in (driver, reference):
            d._open(d.runner)
        prompts = [tokens(20 + i, 60 + i) for i in range(count)]
        outputs = driver.generate([driver.assign(i, p, room=8) for i, p in enumerate(prompts)], 8)
        for prompt, output in zip(prompts, outputs, strict=True):
            # A token that float64 finds nearly as likely as the likeliest one.
            rows = reference.logits(9, prompt + output[:-1], [60, len(prompt) + len(output) - 61])[-len(output) :]
            gaps = rows.max(1) - rows[np.arange(len(output)), output]
            assert float(gaps.max()) < 2 * LIMIT * float(np.abs(rows).max())


def test_blocks_before_a_window_are_not_read_by_the_devices_kernels() -> None:
    """They are given to other requests while this one runs."""
    config = config_of("mistral")
    assert config.attention_window == WINDOW
    outputs = []
    for is_poisoned in (False, True):
        driver = on_device(config)
        request = driver.assign(0, tokens(3, 200), room=24)
        driver.generate([request], 4)
        if is_poisoned:
            unseen = request.block_ids[: (204 - WINDOW) // driver.config.block_size]
            for kv in driver.torch_device._decoder._kv:
                kv[unseen] = torch.nan
        outputs.append([driver.step(run=[RunSlot(0, request.slot_epoch, 1)]) for _ in range(12)])
    assert outputs[0] == outputs[1]


ATTENTION = {
    "64, window 100, sinks": (12, 2, 64, 16, Scoring(0.1, window=100, sinks=torch.linspace(-2, 3, 12))),
    "128, window 1000": (16, 8, 128, 16, Scoring(128**-0.5, window=1000)),
    "256, window 300, soft-cap": (8, 2, 256, 64, Scoring(0.07, window=300, softcap=30.0)),
}  # fmt: skip


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_with_windows_is_the_same_in_every_plan_of_decode_and_in_chunks_cut_anywhere(case: str) -> None:
    from tests.kernels import test_triton_exactness as exactness

    num_heads, num_kv_heads, dim, block_size, scoring = ATTENTION[case]
    if scoring.sinks is not None:
        scoring = Scoring(scoring.scale, scoring.window, scoring.softcap, scoring.sinks.to(exactness.DEVICE))
    attending = exactness.Attending(exactness.Heads(num_heads, num_kv_heads, dim, block_size), 3.0, scoring)
    queries, kv = attending.rotated(exactness.LENGTH)

    def results() -> Iterator[tuple[str, torch.Tensor]]:
        for name, cuts in exactness.CUTS.items():
            yield name, attending.of_chunks(queries, kv, cuts)
        for plan in exactness._decode_plans(dim):
            yield str(plan), attending.decoded(kv.clone(), plan)

    _, first = next(results())
    assert float((first - attending.expected(queries, kv)).abs().max()) < 0.02 * float(first.abs().max())
    exactness.assert_equal_results(results())
