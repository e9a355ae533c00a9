"""No request waits for a compiler: whatever steps bring, their kernels are among those that are compiled at the start.

Nothing is launched here; which kernels would have been is noted. Needs Triton, and no device.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from onward.proto.model import ModelConfig
from onward.proto.reasoning_params import ReasoningParams
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import RunSlot
from onward.worker.cuda.kernel_precompile import layers_of_each_kind
from tests.worker.cuda.small_model import DeviceDriver
from tests.worker.cuda.test_families_on_device import MAX_MODEL_LEN, config_of

EIGHT_KV_HEADS = ModelConfig(
    architecture="qwen3", vocab_size=6144, hidden_size=256, intermediate_size=512, num_layers=1, num_heads=16,
    num_kv_heads=8, head_dim=64, max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=10_000.0, qk_norm=True,
    tie_word_embeddings=True,
)  # fmt: skip
SETTINGS: dict[str, Any] = {"max_num_seqs": 96, "max_model_len": 4096, "dtype": "bfloat16", "num_kv_blocks": 512}
PLAIN, CUT = SamplingParams(seed=1), SamplingParams(seed=1, top_p=0.9)
CAREFUL = SamplingParams(seed=1, logprobs=2, repetition_penalty=1.2)
BUDGETED = SamplingParams(seed=1, reasoning=ReasoningParams((3,), (5,), starts_in_reasoning=True, budget=1))
KINDS = (PLAIN, CUT, CAREFUL, BUDGETED)


def _driver(*, deterministic: bool, max_num_batched_tokens: int) -> DeviceDriver:
    from onward.kernels.triton.triton_ops import TritonOps

    return DeviceDriver(
        EIGHT_KV_HEADS, ops=TritonOps(max_model_len=4096, fixed_order=deterministic), deterministic=deterministic,
        max_num_batched_tokens=max_num_batched_tokens, **SETTINGS,
    )  # fmt: skip


def _step_of(driver: DeviceDriver, num_decoding: int, chunks: Sequence[int], sampling: SamplingParams) -> None:
    """One with so many rows that decode, and prompts of these lengths."""
    driver._open(driver.runner)
    decoding = [driver.assign(slot, [1] * 9, room=2, sampling=sampling) for slot in range(num_decoding)]
    driver.step(assign=decoding, run=[RunSlot(one.slot, one.slot_epoch, 9) for one in decoding])
    new = [driver.assign(num_decoding + i, [1] * count, room=2, sampling=sampling) for i, count in enumerate(chunks)]
    runs = [RunSlot(one.slot, one.slot_epoch, 1) for one in decoding]
    driver.step(assign=new, run=runs + [RunSlot(one.slot, one.slot_epoch, len(one.token_ids)) for one in new])


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_kernel_of_any_step_is_compiled_at_the_start(deterministic: bool) -> None:
    from onward.kernels.triton.kernel_launch import record_variants

    with record_variants() as rehearsed:
        _driver(deterministic=deterministic, max_num_batched_tokens=512).rehearse()
    driver = _driver(deterministic=deterministic, max_num_batched_tokens=2048)
    steps = [(n, chunks, PLAIN) for n in (0, 1, 3, 5, 6, 7, 11, 17, 20, 29, 40, 63, 65, 90) for chunks in ([1], [33])]
    steps += [(n, [16, 7, 900], sampling) for n in (0, 1, 6, 16, 90) for sampling in KINDS]
    steps += [(n, [], sampling) for n in (1, 3, 16, 90) for sampling in KINDS]
    for step in steps:
        with record_variants() as needed:
            _step_of(driver, *step)
        assert needed <= rehearsed, step


def test_every_kernel_of_a_vector_is_compiled_at_the_start() -> None:
    from onward.kernels.triton.kernel_launch import record_variants

    with record_variants() as rehearsed:
        _driver(deterministic=False, max_num_batched_tokens=512).rehearse()
    driver = _driver(deterministic=False, max_num_batched_tokens=2048)
    for count in (1, 3, 16, 33, 1600):
        with record_variants() as needed:
            _step_of(driver, 0, [count], SamplingParams(seed=0, pooling="mean"))
        assert needed <= rehearsed, count


def test_a_model_with_a_layer_of_each_kind_has_all_kernels_of_the_model() -> None:
    """Which is what the processes that compile have: windows, and layers with and without them."""
    from onward.kernels.triton.kernel_launch import record_variants
    from onward.kernels.triton.triton_ops import TritonOps

    whole = config_of("gemma3")
    small = layers_of_each_kind(whole)
    assert (whole.num_layers, small.num_layers) == (3, 2)
    variants = []
    for config in (whole, small):
        with record_variants() as found:
            ops = TritonOps(max_model_len=MAX_MODEL_LEN, fixed_order=True)
            DeviceDriver(config, ops=ops, dtype="bfloat16", deterministic=True, max_num_seqs=2).rehearse()
        variants.append(set(found))
    assert variants[0] == variants[1]
    assert len({name for name, _, _ in variants[0]}) > 5
