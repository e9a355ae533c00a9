"""Small int8 models of any shape of head, and every path on which one request's logits can be computed.

Each path returns the logits of the same tokens, so that two paths can be compared element by element.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import gguf
import msgspec
import numpy as np

from onward.kernels.quantize import quantize_model
from onward.models.loader.dummy_weights import DummyWeights
from onward.proto.model import ModelConfig
from onward.worker.token_span import unowned_span
from tests.worker.driver import Driver, prepared

HEAD_SIZES = (32, 64, 96, 128, 256)
GROUP_SIZES = (1, 2, 3, 4, 7, 8)
VOCAB = 97
TARGET = 2
"""The slot whose rows are compared."""
_LIVELINESS = np.float32(6.0)
_NUM_OTHERS = 5


def shape(head_dim: int, group_size: int, **changes: Any) -> ModelConfig:
    """Odd numbers of groups in every product, two KV heads where one would be too few items to share out."""
    kv_heads = 1 if group_size > 4 else 2
    config = ModelConfig(
        architecture="llama", vocab_size=VOCAB, hidden_size=160, intermediate_size=224, num_layers=2,
        num_heads=kv_heads * group_size, num_kv_heads=kv_heads, head_dim=head_dim, max_position_embeddings=2048,
        rms_norm_eps=1e-5, rope_theta=10_000.0, tie_word_embeddings=True,
    )  # fmt: skip
    return msgspec.structs.replace(config, **changes)


class LivelyWeights(DummyWeights):
    """Large enough that some keys are attended to and others are not."""

    def __init__(self, config: ModelConfig, *, is_grid: bool) -> None:
        super().__init__(config)
        self._is_grid = is_grid

    def __getitem__(self, name: str) -> np.ndarray:
        values = super().__getitem__(name)
        if values.ndim != 2:
            return values
        values = values * _LIVELINESS
        if not self._is_grid:
            return values
        kind = gguf.GGMLQuantizationType.Q4_1
        return gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)


@functools.cache
def arrays(config: ModelConfig, is_grid: bool = False) -> dict[str, np.ndarray]:
    """`is_grid`: weights of four bits, which are packed as nibbles."""
    return dict(quantize_model(config, LivelyWeights(config, is_grid=is_grid)))


def new_driver(config: ModelConfig, *, is_grid: bool = False, max_rows: int = 256, **settings: Any) -> Driver:
    defaults = {
        "num_kv_blocks": 512, "max_num_seqs": max_rows, "max_num_batched_tokens": max_rows, "max_model_len": 512,
        "threads": 2,
    }  # fmt: skip
    return Driver(prepared(config, quantization="int8"), arrays(config, is_grid), **(defaults | settings))


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


Path = Callable[[Driver, list[int]], np.ndarray]


def one_at_a_time(driver: Driver, token_ids: list[int]) -> np.ndarray:
    return driver.logits(TARGET, token_ids, [1] * len(token_ids))


def in_chunks(*sizes: int) -> Path:
    """Chunks of these sizes, again and again."""

    def path(driver: Driver, token_ids: list[int]) -> np.ndarray:
        return driver.logits(TARGET, token_ids, cut(len(token_ids), sizes))

    return path


def cut(count: int, sizes: Sequence[int]) -> list[int]:
    chunks: list[int] = []
    while (left := count - sum(chunks)) > 0:
        chunks.append(min(left, sizes[len(chunks) % len(sizes)]))
    return chunks


def mixed_with_others(driver: Driver, token_ids: list[int]) -> np.ndarray:
    """In each step before and behind the rows of other requests, some of which decode and some of which prefill."""
    others = [driver.assign(slot, tokens(400, seed=slot)) for slot in range(10, 10 + _NUM_OTHERS)]
    mine = driver.assign(TARGET, token_ids)
    driver.step(assign=[mine, *others])
    done = dict.fromkeys((other.slot for other in others), 0)
    parts, start = [], 0
    for step, count in enumerate(cut(len(token_ids), (1, 19, 1, 1, 40, 7))):
        spans = []
        for place, other in enumerate(others):
            width = (1, 9, 1, 23, 3)[(step + place) % 5]
            spans.append(unowned_span(other.slot, done[other.slot], width, is_sampled=True))
            done[other.slot] += width
        at = step % len(spans)
        before = sum(span.count for span in spans[:at])
        logits = driver.runner.compute_logits(
            [*spans[:at], unowned_span(TARGET, start, count, is_sampled=True), *spans[at:]]
        )
        parts.append(logits[before : before + count])
        start += count
    for request in (mine, *others):
        driver.give_back(request.block_ids)
    return np.concatenate(parts)


def prefix_cached(driver: Driver, token_ids: list[int]) -> np.ndarray:
    """The first half in blocks that another request has filled, the rest in one chunk."""
    size = driver.config.block_size
    shared = len(token_ids) // 2 // size * size
    first = driver.assign(0, token_ids)
    driver.step(assign=[first])
    head = np.concatenate(
        [driver.runner.compute_logits([unowned_span(0, start, 16, is_sampled=True)]) for start in range(0, shared, 16)]
    )
    own = driver.blocks_for(len(token_ids) - shared)
    blocks = first.block_ids[: shared // size] + own
    second = driver.assign(TARGET, token_ids, blocks=blocks, num_computed=shared)
    driver.step(assign=[second])
    tail = driver.runner.compute_logits([unowned_span(TARGET, shared, len(token_ids) - shared, is_sampled=True)])
    driver.give_back(first.block_ids + own)
    return np.concatenate([head, tail])


def resumed(driver: Driver, token_ids: list[int]) -> np.ndarray:
    """A request that decoded half of its tokens, lost its slot and blocks, and is computed again in another slot."""
    half = len(token_ids) // 2 + 3
    driver.logits(0, token_ids[:half], [1] * half)
    again = driver.assign(TARGET, token_ids)
    driver.step(assign=[again])
    parts = [
        driver.runner.compute_logits([unowned_span(TARGET, start, count, is_sampled=True)])
        for start, count in ((0, half), (half, 1), (half + 1, len(token_ids) - half - 1))
    ]
    driver.give_back(again.block_ids)
    return np.concatenate(parts)


PATHS: dict[str, Path] = {
    "one chunk": in_chunks(1 << 20),
    "chunks cut at odd positions": in_chunks(1, 2, 13, 3, 65, 5, 7),
    "chunks of prime sizes": in_chunks(31, 17),
    "mixed with other requests": mixed_with_others,
    "prefix cached": prefix_cached,
    "resumed": resumed,
}
"""Each is compared with one token at a time."""
