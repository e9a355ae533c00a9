"""The worker on a real device. Its oracle is the same runner with plain operations, which equals the CPU's runner."""

from typing import Any

import numpy as np
import pytest
import torch

from onward.kernels.torch_ops import TorchOps
from onward.models.layers.device.model_weights import LinearWeights
from onward.proto.model import ModelConfig
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import RunSlot, SlotTokens, StepPlan
from tests.worker.cuda.small_model import CONFIG, DeviceDriver
from tests.worker.driver import GREEDY

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * i + j * j) % 199 for j in range(3 + 13 * i)] for i in range(8)]
WIDE = ModelConfig(
    architecture="qwen3", vocab_size=1999, hidden_size=512, intermediate_size=768, num_layers=4, num_heads=8,
    num_kv_heads=4, head_dim=64, max_position_embeddings=2048, rms_norm_eps=1e-6, rope_theta=10_000.0, qk_norm=True,
)  # fmt: skip
FAMILIES = {
    "qwen3": CONFIG,
    "llama": ModelConfig(
        architecture="llama", vocab_size=301, hidden_size=96, intermediate_size=160, num_layers=3, num_heads=6,
        num_kv_heads=2, head_dim=32, max_position_embeddings=512, rms_norm_eps=1e-5, rope_theta=10_000.0,
        tie_word_embeddings=True,
    ),
    "qwen2": ModelConfig(
        architecture="qwen2", vocab_size=301, hidden_size=96, intermediate_size=160, num_layers=3, num_heads=3,
        num_kv_heads=1, head_dim=32, max_position_embeddings=512, rms_norm_eps=1e-5, rope_theta=10_000.0, qkv_bias=True,
    ),
}  # fmt: skip


def on_device(config: ModelConfig = CONFIG, **settings: Any) -> DeviceDriver:
    from onward.kernels.triton.triton_ops import TritonOps

    ops = TritonOps(max_model_len=256, fixed_order=settings.get("deterministic", False))
    return DeviceDriver(config, ops=ops, device="cuda", **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_in_float32_are_the_plain_ones(family: str) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    config = FAMILIES[family]
    plain, fast = DeviceDriver(config), on_device(config)
    for count in (1, 3, 8):
        expected = plain.generate([plain.assign(i, PROMPTS[i], room=24) for i in range(count)], 24)
        assert fast.generate([fast.assign(i, PROMPTS[i], room=24) for i in range(count)], 24) == expected
        for driver in (plain, fast):
            driver._open(driver.runner)  # its blocks are free again


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=3, temperature=0.8),
        SamplingParams(seed=2**63 + 5, choice_index=2, temperature=1.0, top_k=20, top_p=0.9, min_p=0.01),
        SamplingParams(seed=4, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, logprobs=3),
        SamplingParams(
            seed=5, logit_bias=((3, 4.0), (8, -100.0)), bad_words=((5,), (7, 9)), min_tokens=6, end_token_ids=(2,)
        ),
        SamplingParams(seed=6, temperature=0.0, logprobs=0, prompt_logprobs=2),
        SamplingParams(seed=8, allowed_token_ids=(3, 5, 8, 13, 21), logprobs=2),
    ],
    ids=["plain", "cuts", "penalties", "words", "logprobs", "allowed"],
)
def test_every_way_of_sampling_draws_the_plain_tokens(sampling: SamplingParams) -> None:
    drivers = DeviceDriver(), on_device()
    told = []
    for driver in drivers:
        request = driver.assign(0, PROMPTS[2], room=16, sampling=sampling)
        events = driver.step(assign=[request], run=[RunSlot(0, request.slot_epoch, 64)])
        for _ in range(12):
            events += driver.step(run=[RunSlot(0, request.slot_epoch, 1)])
        told.append(events)
    for plain, fast in zip(*told, strict=True):
        assert isinstance(plain, SlotTokens) and isinstance(fast, SlotTokens)
        assert (fast.token_ids, fast.position) == (plain.token_ids, plain.position)
        for ours, theirs in zip(fast.logprobs or [], plain.logprobs or [], strict=True):
            assert ours.rank == theirs.rank
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_steps_in_flight_give_the_tokens_of_single_steps() -> None:
    driver = on_device(max_num_batched_tokens=256)
    expected = driver.generate([driver.assign(i, PROMPTS[i], room=40) for i in range(6)], 30)
    driver._open(driver.runner)
    requests = [driver.assign(i, PROMPTS[i], room=40) for i in range(6)]
    plans = [StepPlan(1, assign=requests, run=[RunSlot(r.slot, r.slot_epoch, len(r.token_ids)) for r in requests])]
    plans += [StepPlan(n, run=[RunSlot(r.slot, r.slot_epoch, 1) for r in requests]) for n in range(2, 31)]
    found: dict[int, list[int]] = {i: [] for i in range(6)}
    for result in driver.overlapped(plans):
        for event in result.events:
            assert isinstance(event, SlotTokens)
            found[event.slot] += event.token_ids
    assert [found[i] for i in range(6)] == expected


def test_deterministic_logits_have_the_same_bits_in_any_chunking() -> None:
    tokens = [(11 * i * i + 5) % 1999 for i in range(230)]
    driver = on_device(WIDE, dtype="bfloat16", deterministic=True, num_kv_blocks=128, max_num_batched_tokens=256)
    whole = driver.logits(0, tokens, [230 // 4] * 4 + [230 % 4])
    for chunks in ([64] * 3 + [38], [1, 17, 46, 1, 1, 64, 64, 36], [1] * 40 + [63, 64, 63]):
        assert np.array_equal(driver.logits(1, tokens, chunks), whole), chunks


def test_deterministic_tokens_are_the_same_alone_in_any_batch_and_after_a_resume() -> None:
    settings: dict[str, Any] = {
        "dtype": "bfloat16", "deterministic": True, "num_kv_blocks": 512, "max_num_seqs": 96, "max_model_len": 256,
        "max_num_batched_tokens": 512,
    }  # fmt: skip
    prompts = [[(31 * i + j * j + 7) % 1999 for j in range(1 + (i * 29) % 120)] for i in range(70)]
    driver = on_device(WIDE, **settings)
    together = driver.generate([driver.assign(i, p, room=40) for i, p in enumerate(prompts)], 40)
    for i in (0, 3, 17, 42, 69):
        driver._open(driver.runner)
        assert driver.generate([driver.assign(5, prompts[i], room=40)], 40)[0] == together[i]
        driver._open(driver.runner)
        resumed = driver.assign(9, prompts[i] + together[i][:25], room=20, num_prompt=len(prompts[i]))
        assert _resume(driver, resumed, 15) == together[i][25:]


def _resume(driver: DeviceDriver, request: Any, count: int) -> list[int]:
    events = driver.step(assign=[request], run=[RunSlot(request.slot, request.slot_epoch, len(request.token_ids))])
    for _ in range(count - 1):
        events += driver.step(run=[RunSlot(request.slot, request.slot_epoch, 1)])
    return [event.token_ids[0] for event in events if isinstance(event, SlotTokens)]


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 512, 768), (5, 1024, 512), (200, 768, 512)])
def test_products_with_fp8_weights_are_the_plain_ones(rows: int, inputs: int, outputs: int) -> None:
    """How far fp8 itself is from wider weights is measured on a real model (docs/gpu.md)."""
    from onward.kernels.triton.triton_ops import TritonOps

    matrix = LinearWeights(torch.randn(outputs, inputs, device="cuda"))
    matrix.quantize_to_fp8()
    x = torch.randn(rows, inputs, device="cuda").bfloat16()
    expected, found = (torch.full((rows, outputs), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    TorchOps().matmul(x, matrix.weight, expected, None, matrix.scales)
    TritonOps(max_model_len=256).matmul(x, matrix.weight, found, None, matrix.scales)
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-2


@pytest.mark.parametrize("count", [1, 5])
def test_a_model_with_fp8_weights_generates(count: int) -> None:
    driver = on_device(WIDE, dtype="bfloat16", quantization="fp8", max_num_batched_tokens=256)
    requests = [driver.assign(i, PROMPTS[i], room=8, sampling=GREEDY) for i in range(count)]
    assert all(len(output) == 8 for output in driver.generate(requests, 8))
