"""Attention over paged KV: right, blind to what it must not see, and the same bits however the rows are cut."""

from collections.abc import Sequence

import numpy as np
import pytest
from numba import carray

from onward.kernels import numpy_reference
from onward.kernels.cpu import simd
from onward.kernels.cpu.attention_tiles import row_tile, scratch_size
from onward.kernels.cpu.batch_attention import (
    CONTEXT,
    attend_item,
    rotate_and_attend,
    rotate_and_attend_with_options,
    rotate_rows,
)
from onward.kernels.cpu.batch_fields import AttentionOptions
from onward.kernels.cpu.jit import Kernel, kernel_function
from onward.kernels.cpu.kv_layout import record_size
from onward.kernels.cpu.phases import claim_items, mark_finished, wait_for_phase
from onward.kernels.numpy_reference import ScoreRules
from tests.kernels.kernel_runs import run

LENGTH = 75


@kernel_function
def _attend_int8(thread, c, options):
    work, kv = simd.int64s(c.work), simd.uint8s(c.kv)
    rotate_rows(c, 0, thread, kv, c.kv_at, c.q_norm, c.k_norm, options)
    num_items = c.num_tiles * c.num_kv_heads
    item = claim_items(work, 1, 0, 1)
    while item < num_items:
        attend_item(c, item, kv, c.kv_at, thread * c.scratch_stride, options)
        mark_finished(work, 1, 1)
        item = claim_items(work, 1, 0, 1)
    wait_for_phase(work, 1, num_items)


def _with_int8_kv(thread, context):
    _attend_int8(thread, carray(context, 1)[0], None)


def _with_int8_kv_and_options(thread, context):
    c = carray(context, 1)[0]
    options = AttentionOptions(c.window, c.sinks, c.cos, c.sin, c.rotary_half, c.true_head_dim, c.norm_is_whole,
                               c.query_factor, c.softcap)  # fmt: skip
    _attend_int8(thread, c, options)


KERNELS = {"float32": rotate_and_attend, "int8": Kernel(_with_int8_kv, CONTEXT)}
WITH_OPTIONS = {"float32": rotate_and_attend_with_options, "int8": Kernel(_with_int8_kv_and_options, CONTEXT)}


class Case:
    """Two slots, of which the second is looked at. Unwritten KV is full of what must not be read."""

    def __init__(self, kv_type: str, *, heads: int = 6, kv_heads: int = 2, head_dim: int = 64, block_size: int = 16,
                 rules: ScoreRules | None = None):  # fmt: skip
        self.rules = rules
        self.kv_type, self.heads, self.kv_heads, self.head_dim = kv_type, heads, kv_heads, head_dim
        self.block_size = block_size
        rng = np.random.default_rng(5)
        self.qkv = rng.standard_normal((LENGTH, heads + 2 * kv_heads, head_dim), dtype=np.float32)
        num_blocks = 2 * -(-LENGTH // block_size) + 3
        self.tables = rng.permutation(num_blocks)[: num_blocks // 2 * 2].reshape(2, -1).astype(np.int32)
        dtype = np.dtype(kv_type)
        size = num_blocks * kv_heads * block_size // 16 * record_size(head_dim, dtype.itemsize)
        self.kv = np.frombuffer(b"\xff" * size * dtype.itemsize, dtype).copy()  # all NaN, scales too
        self.cos, self.sin = np.ones((LENGTH, head_dim // 2), np.float32), np.zeros((LENGTH, head_dim // 2), np.float32)

    def attend(self, chunks: Sequence[int], num_threads: int = 1) -> np.ndarray:
        outs, start = [], 0
        for count in chunks:
            outs.append(self._chunk(start, count, num_threads))
            start += count
        return np.concatenate(outs)

    def _chunk(self, start: int, count: int, num_threads: int) -> np.ndarray:
        group = self.heads // self.kv_heads
        height = row_tile(group)
        starts = range(0, count, height)
        tiles = np.array([(r, min(height, count - r), 1, start + r) for r in starts], np.int32)
        positions = np.arange(start, start + count, dtype=np.int32)
        stride = scratch_size(group, self.head_dim, LENGTH)
        out = np.full((count, self.heads, self.head_dim), np.nan, np.float32)
        kernels, options = KERNELS, {}
        if (rules := self.rules) is not None:
            kernels = WITH_OPTIONS
            scale = self.head_dim**-0.5 if rules.scale is None else rules.scale
            options = {
                "window": rules.window or 0, "softcap": rules.softcap or 0.0, "rotary_half": self.head_dim // 2,
                "true_head_dim": self.head_dim, "query_factor": scale * self.head_dim**0.5,
                "sinks": 0 if rules.sinks is None else rules.sinks,
            }  # fmt: skip
        run(
            kernels[self.kv_type], **options, num_threads=num_threads, num_phases=2, num_rows=count, num_tiles=len(tiles),
            positions=positions, pages=self.tables[1, positions // self.block_size].copy(), tiles=tiles,
            block_tables=self.tables, table_stride=self.tables.shape[1], num_heads=self.heads,
            num_kv_heads=self.kv_heads, head_dim=self.head_dim, kv=self.kv, block_size=self.block_size, cos=self.cos,
            sin=self.sin, qkv=self.qkv[start : start + count].copy(), attended=out,
            scratch=np.zeros(stride * num_threads, np.float32), scratch_stride=stride, num_lots=num_threads,
        )  # fmt: skip
        return out

    def forget_blocks(self, count: int) -> None:
        """As if another request had got the first blocks of the slot, and left NaN there."""
        pages = self.kv.reshape(
            -1, self.kv_heads * self.block_size // 16 * record_size(self.head_dim, self.kv.itemsize)
        )
        for block in self.tables[1, :count]:
            pages[block] = np.frombuffer(b"\xff" * pages[block].nbytes, self.kv.dtype)

    def expected(self) -> np.ndarray:
        q, k, v = np.split(self.qkv, [self.heads, self.heads + self.kv_heads], axis=1)
        attention = numpy_reference.int8_attention if self.kv_type == "int8" else numpy_reference.attention
        return attention(q, k, v, 0, self.rules or ScoreRules())


@pytest.mark.parametrize(
    "shape",
    [
        {}, {"heads": 9, "kv_heads": 3}, {"heads": 2, "kv_heads": 2, "head_dim": 128}, {"heads": 8, "kv_heads": 1},
        {"heads": 7, "kv_heads": 1, "head_dim": 32}, {"block_size": 32}, {"heads": 5, "kv_heads": 5, "head_dim": 96},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kv_type", KERNELS)
def test_attention_is_right_for_every_shape_of_head(kv_type: str, shape: dict[str, int]) -> None:
    case = Case(kv_type, **shape)
    np.testing.assert_allclose(case.attend([LENGTH]), case.expected(), atol=2e-6)


@pytest.mark.parametrize("kv_type", KERNELS)
def test_a_row_has_the_same_bits_however_its_history_was_cut(kv_type: str) -> None:
    whole = Case(kv_type).attend([LENGTH])
    for chunks in ([1] * LENGTH, [16, 16, 43], [5, 7, 1, 62], [74, 1]):
        np.testing.assert_array_equal(Case(kv_type).attend(chunks), whole)


@pytest.mark.parametrize("kv_type", KERNELS)
def test_a_row_has_the_same_bits_on_one_thread_and_on_several(kv_type: str) -> None:
    np.testing.assert_array_equal(Case(kv_type).attend([40, 35], 3), Case(kv_type).attend([40, 35], 1))


@pytest.mark.parametrize("kv_type", KERNELS)
def test_scores_may_be_so_large_that_one_key_takes_all(kv_type: str) -> None:
    case = Case(kv_type)
    case.qkv[:, : case.heads + case.kv_heads] *= 40
    np.testing.assert_allclose(case.attend([LENGTH]), case.expected(), atol=2e-3)  # scores in the thousands


SINKS = np.linspace(-1.0, 3.0, 6).astype(np.float32)
RULES = {
    "none": ScoreRules(), "scale": ScoreRules(scale=0.4), "window": ScoreRules(window=8),
    "long window": ScoreRules(window=66), "softcap": ScoreRules(softcap=0.7), "sinks": ScoreRules(sinks=SINKS),
    "all": ScoreRules(0.3, 19, 1.5, SINKS),
}  # fmt: skip


@pytest.mark.parametrize("rules", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("kv_type", KERNELS)
def test_windows_soft_caps_sinks_and_scales_are_those_of_the_reference(kv_type: str, rules: ScoreRules) -> None:
    case = Case(kv_type, rules=rules)
    np.testing.assert_allclose(case.attend([LENGTH]), case.expected(), atol=5e-6)


@pytest.mark.parametrize("rules", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("kv_type", KERNELS)
def test_a_row_with_rules_has_the_same_bits_however_its_history_was_cut(kv_type: str, rules: ScoreRules) -> None:
    whole = Case(kv_type, rules=rules).attend([LENGTH])
    for chunks in ([1] * LENGTH, [16, 16, 43], [5, 7, 1, 62]):
        np.testing.assert_array_equal(Case(kv_type, rules=rules).attend(chunks, 2), whole)


@pytest.mark.parametrize("window", [8, 20, 33])
@pytest.mark.parametrize("kv_type", KERNELS)
def test_blocks_before_the_window_are_not_read(kv_type: str, window: int) -> None:
    """They may be another request's by then; NaN in them would show."""
    start = 64
    kept, lost = (Case(kv_type, rules=ScoreRules(window=window)) for _ in range(2))
    kept.attend([start])
    lost.attend([start])
    lost.forget_blocks((start - window + 1) // lost.block_size)
    np.testing.assert_array_equal(lost._chunk(start, LENGTH - start, 1), kept._chunk(start, LENGTH - start, 1))


def test_the_reference_with_sinks_is_gpt_oss() -> None:
    import torch
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    case = Case("float32", rules=ScoreRules(scale=0.4, window=19, sinks=SINKS))
    q, k, v = np.split(case.qkv, [case.heads, case.heads + case.kv_heads], axis=1)
    module = torch.nn.Module()
    module.num_key_value_groups, module.training = case.heads // case.kv_heads, False
    module.sinks = torch.nn.Parameter(torch.from_numpy(SINKS))
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    mask = torch.where((distance >= 0) & (distance < 19), 0.0, float("-inf"))[None, None]
    heads_first = [torch.from_numpy(x).transpose(0, 1)[None] for x in (q, k, v)]
    theirs, _ = eager_attention_forward(module, *heads_first, mask, scaling=0.4)
    np.testing.assert_allclose(case.expected(), theirs[0].detach().numpy(), atol=1e-5)
