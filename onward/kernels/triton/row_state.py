"""The beginning and the end of a step's rows: loads their slots' state, and appends their sampled tokens."""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from onward.kernels.ops import RowTensors, SlotTensors
from onward.kernels.triton.kernel_launch import launch

_BLOCKS_AT_ONCE = 128
_ROWS_AT_ONCE = 256


@triton.jit
def _load_rows(
    inputs, tokens, tables, int_params, float_params, token_ids, row_tables, temperatures, top_ps, min_ps, top_ks,
    seeds, choices, positions, num_slots, input_stride, tokens_stride, tables_stride, row_tables_stride,
    PAGE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(inputs + row).to(tl.int64)
    length = tl.load(inputs + input_stride + row)
    new_block = tl.load(inputs + 2 * input_stride + row)
    newest = tl.maximum(length - 1, 0)
    grown = newest // PAGE
    tables += slot * tables_stride
    if new_block >= 0:
        tl.store(tables + grown, new_block)
    tl.store(token_ids + row, tl.load(tokens + slot * tokens_stride + newest))
    lanes = tl.arange(0, AT_ONCE)
    num_blocks = grown + 1
    for at in range(0, num_blocks, AT_ONCE):
        table_indices = at + lanes
        blocks = tl.load(tables + table_indices, mask=table_indices < num_blocks, other=0)
        # The block that was just stored may not be visible to this load.
        blocks = tl.where((table_indices == grown) & (new_block >= 0), new_block, blocks)
        tl.store(
            row_tables + row.to(tl.int64) * row_tables_stride + table_indices, blocks, mask=table_indices < num_blocks
        )
    tl.store(temperatures + row, tl.load(float_params + slot))
    tl.store(top_ps + row, tl.load(float_params + num_slots + slot))
    tl.store(min_ps + row, tl.load(float_params + 2 * num_slots + slot))
    tl.store(top_ks + row, tl.load(float_params + 3 * num_slots + slot).to(tl.int32))
    tl.store(seeds + row, tl.load(int_params + slot))
    tl.store(choices + row, tl.load(int_params + num_slots + slot))
    tl.store(positions + row, length.to(tl.int64) - tl.load(int_params + 2 * num_slots + slot))


@triton.jit
def _append_sampled(
    inputs, sampled, tokens, num_rows, input_stride, sampled_stride, tokens_stride, BLOCK: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = rows < num_rows
    slots = tl.load(inputs + rows, mask=is_in, other=0).to(tl.int64)
    lengths = tl.load(inputs + input_stride + rows, mask=is_in, other=0)
    token = tl.load(sampled + rows, mask=is_in, other=0)
    tl.store(tokens + slots * tokens_stride + lengths, token, mask=is_in)


def load_rows(slots: SlotTensors, rows: RowTensors, block_size: int) -> None:
    launch(
        _load_rows, (len(rows.token_ids),),
        rows.inputs, slots.tokens, slots.tables, slots.int_params, slots.float_params, rows.token_ids, rows.tables,
        rows.temperatures, rows.top_ps, rows.min_ps, rows.top_ks, rows.seeds, rows.choices, rows.positions,
        slots.int_params.shape[1], rows.inputs.stride(0), slots.tokens.stride(0), slots.tables.stride(0),
        rows.tables.stride(0), PAGE=block_size, AT_ONCE=_BLOCKS_AT_ONCE, num_warps=1,
    )  # fmt: skip


def append_sampled_tokens(slots: SlotTensors, rows: RowTensors) -> None:
    count = len(rows.token_ids)
    launch(
        _append_sampled, (triton.cdiv(count, _ROWS_AT_ONCE),),
        rows.inputs, rows.sampled, slots.tokens, count, rows.inputs.stride(0), rows.sampled.stride(0),
        slots.tokens.stride(0), BLOCK=_ROWS_AT_ONCE, num_warps=1,
    )  # fmt: skip
