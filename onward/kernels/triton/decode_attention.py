"""All operations between the QKV product and the output product of a decode step, in one launch.

These are the norm of each query and key head (Qwen3; optional), rotary embedding, KV write, and attention of one new
token per request over its paged history. The new key and value are put into the last tile from registers, so that no
program waits for another one's write. The program of the last split writes them for later steps.

    qkv     [batch, (heads + 2 kv heads) * head_dim]: queries, keys, values of one token each
    history positions 0 .. length - 2 are in the pages; position length - 1 is the new token

A batch that fills the device has one program for each (row, KV head), which merges splits as it computes them. A
smaller batch has several: each computes every n-th split, and the last program to finish merges them in order. The grid
depends on the batch alone, so that a captured graph serves every length.
"""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from onward.kernels.ops import HeadShape, Scoring
from onward.kernels.triton.head_rotation import head_sizes, head_tensors, load_angles, load_norm, rotated
from onward.kernels.triton.kernel_launch import is_launching, launch
from onward.kernels.triton.kv_page_layout import check_kv_layout
from onward.kernels.triton.split_softmax import (
    FIXED_SPLITS,
    LOG2_E,
    WHOLE,
    Splits,
    add_sinks,
    add_tile,
    empty_softmax,
    ends_split,
    load_sinks,
    load_tile,
    merge_split,
    normalised,
    scoring_flags,
    split_of,
    split_start,
)

MIN_DOT_COLUMNS = 8
_MERGED_AT_ONCE = 8
_FOUR_WARPS_UP_TO = 32
"""Pairs of row and KV head. Up to this number, each program gets four warps."""
_ONE_PROGRAM_FROM = 384
"""Pairs of row and KV head. From this number on, each pair has one program."""
_WANTED_PROGRAMS = 1024
"""Number of programs that share the work of fewer pairs."""
_WIDE_BELOW = 1024
"""Pairs of row and KV head. Below this number, and without a fixed order, a program has two warps and wider tiles.
Programs of one warp would lose more to the matrix product after them, which is launched early and takes room beside
them."""
_WIDE = Splits(0, 0, 0, tile=64)
"""One split, for programs of two warps."""
_SHORT_SPLITS = Splits(fine=64, num_fine=32, coarse=256)
"""For few pairs, without a fixed order."""
_LONG_SPLITS = Splits(fine=256, num_fine=8, coarse=256)
"""For more pairs that still have several programs each, without a fixed order."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How the work of a batch is divided among programs. Only `splits` decides the order of sums."""

    splits: Splits
    parts: int = 1
    """Programs of one (row, KV head)."""
    num_warps: int = 1
    num_stages: int = 4

    @property
    def loads_early(self) -> bool:
        """Whether the last tile is loaded before the launch waits for the kernel before it: four warps have registers for
        that."""
        return self.num_warps >= 4

    @classmethod
    def choose(
        cls, batch: int, num_kv_heads: int, head_dim: int, max_length: int, *, fixed_order: bool
    ) -> "DecodePlan":
        """Returns the plan for a batch of this shape: the fastest one on an H200, with `fixed_order` among those that give
        equal bits."""
        programs = batch * num_kv_heads
        num_warps = 4 if programs <= _FOUR_WARPS_UP_TO or head_dim > 128 else 1
        if programs >= _ONE_PROGRAM_FROM:
            if not fixed_order and programs < _WIDE_BELOW and num_warps == 1:
                return cls(_WIDE, num_warps=2, num_stages=3)
            return cls(FIXED_SPLITS if fixed_order else WHOLE, num_warps=num_warps)
        if fixed_order:
            splits = FIXED_SPLITS
        else:
            splits = _SHORT_SPLITS if programs <= _FOUR_WARPS_UP_TO else _LONG_SPLITS
        parts = min(splits.count(max_length), -(-_WANTED_PROGRAMS // programs))
        return cls(splits, parts, num_warps, num_stages=3 if num_warps > 1 else 4)


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Partial results of splits, for launches with several programs for each pair of row and KV head. The program of
    a pair that finishes last merges them. `heads` are the query heads of one KV head."""

    partials: torch.Tensor
    """float32 [rows, KV heads, splits, heads, head_dim]: weighted sums of values, not yet normalised."""
    peaks: torch.Tensor
    """float32 [rows, KV heads, splits, heads]: largest scores."""
    totals: torch.Tensor
    """float32 [rows, KV heads, splits, heads]: sums of weights."""
    tickets: torch.Tensor
    """int32 [rows, KV heads]: an atomic counter of the pair's programs that have finished. The last one finds by it
    that it has to merge, and sets it back to 0 for the next launch."""

    @classmethod
    def allocate(
        cls, batch: int, num_heads: int, num_kv_heads: int, head_dim: int, num_splits: int, device: str
    ) -> "DecodeScratch":
        def floats(*shape: int) -> torch.Tensor:
            size = (batch, num_kv_heads, num_splits, num_heads // num_kv_heads, *shape)
            if not is_launching():
                return torch.empty(1, dtype=torch.float32, device=device).expand(size)
            return torch.empty(size, dtype=torch.float32, device=device)

        tickets = torch.zeros((batch, num_kv_heads), dtype=torch.int32, device=device)
        return cls(floats(head_dim), floats(), floats(), tickets)

    @classmethod
    def for_batches(
        cls, heads: HeadShape, max_batch: int, max_length: int, device: str, *, fixed_order: bool
    ) -> "DecodeScratch":
        """Allocates memory for every batch of at most `max_batch` rows, with histories of at most `max_length`
        tokens. Batches with _ONE_PROGRAM_FROM or more pairs need none, because one program computes all splits of a
        pair."""
        rows = min(max_batch, -(-_ONE_PROGRAM_FROM // heads.num_kv_heads))
        kinds = (FIXED_SPLITS,) if fixed_order else (_SHORT_SPLITS, _LONG_SPLITS)
        num_splits = max(splits.count(max_length) for splits in kinds)
        return cls.allocate(rows, heads.num_heads, heads.num_kv_heads, heads.dim, num_splits, device)


@triton.jit
def _add_last_tile(
    q, keys, values, key, value, at, begin, position, scale, peak, total, acc,
    TILE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Adds the tile with the new token, whose key and value are not in its page yet."""
    positions = at + tl.arange(0, TILE)[:, None]
    keys, values = tl.where(positions == position, key, keys), tl.where(positions == position, value, values)
    visible = positions <= position
    if WINDOW > 0:
        visible = visible & (positions >= begin)
    return add_tile(q, keys, values, visible, scale, peak, total, acc, 0, True, CAP)


@triton.jit
def _add_earlier_tile(
    q, keys, values, at, begin, scale, peak, total, acc, TILE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr
):  # fmt: skip
    """Adds a tile before the last one."""
    if WINDOW > 0:
        visible = at + tl.arange(0, TILE)[:, None] >= begin
        peak, total, acc = add_tile(q, keys, values, visible, scale, peak, total, acc, 0, True, CAP)
    else:
        peak, total, acc = add_tile(q, keys, values, None, scale, peak, total, acc, 0, False, CAP)
    return peak, total, acc


@triton.jit
def _merge_all(
    partials, peaks, totals, out, sinks, first, first_split, num_splits,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    heads, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_head = heads < GROUP
    is_in = is_head[:, None] & (dims < DIM)[None, :]
    peak, total, acc = empty_softmax(ROWS, WIDTH, 1)
    for start in range(first_split, num_splits, AT_ONCE):
        # Unrolled, so that all of their loads run at the same time. After the last split nothing is merged.
        for step in tl.static_range(AT_ONCE):
            split = start + step
            is_split = is_head & (split < num_splits)
            at = (first + split) * GROUP + heads
            split_peak = tl.load(peaks + at, mask=is_split, other=-float("inf"))
            split_total = tl.load(totals + at, mask=is_split, other=0.0)
            split_acc = tl.load(
                partials + at[:, None] * DIM + dims[None, :], mask=is_in & (split < num_splits), other=0.0
            )  # fmt: skip
            peak, total, acc = merge_split(peak, total, acc, split_peak, split_total, split_acc, 1, False)
    if SINKS:
        total, acc = add_sinks(peak, total, acc, load_sinks(sinks, heads, is_head), 1)
    result = normalised(total, acc, 1).to(out.dtype.element_ty)
    tl.store(out + heads[:, None] * DIM + dims[None, :], result, mask=is_in)


@triton.jit
def _decode_attention(
    qkv, kv, tables, lengths, out, q_norm, k_norm, cos_table, sin_table, sinks, partials, peaks, totals, tickets,
    scale, eps, qkv_stride, table_stride, page_stride, value_offset, out_stride, max_splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, MERGE_ROWS: tl.constexpr, PAGE: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, FINE: tl.constexpr, NUM_FINE: tl.constexpr,
    COARSE: tl.constexpr, PARTS: tl.constexpr, NORM: tl.constexpr, ROTATED: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    # Queries are columns here: a group of heads is narrow, and matrix instructions have 8 columns but 16 rows.
    kv_head, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    position = tl.maximum(length - 1, 0)
    last_tile = position // TILE * TILE
    num_splits = 1
    if FINE > 0:
        num_splits = split_of(position, FINE, NUM_FINE, COARSE) + 1
    begin, first_tile, first_split = 0, 0, 0
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0)
        first_tile = begin // TILE * TILE
        if FINE > 0:
            first_split = split_of(begin, FINE, NUM_FINE, COARSE)
    num_seen = num_splits - first_split
    has_last = part == (num_seen - 1) % PARTS
    table = tables + row.to(tl.int64) * table_stride
    cos, signed_sin = load_angles(cos_table, sin_table, position, DIM, WIDTH, ROTATED)
    q_weights, q_partner_weights = load_norm(q_norm, DIM, WIDTH, ROTATED, NORM)
    k_weights, k_partner_weights = load_norm(k_norm, DIM, WIDTH, ROTATED, NORM)
    if EARLY:
        # The kernel before this one does not write the history.
        last_keys, last_values = load_tile(
            kv, table, kv_head, last_tile, begin, tl.where(has_last, position, 0), page_stride, value_offset,
            PAGE, DIM, WIDTH, TILE, True, WINDOW,
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (length == 0) | (part >= num_seen):
        return
    heads, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_dim = (dims < DIM)[None, :]
    qkv += row.to(tl.int64) * qkv_stride
    q_at = qkv + (kv_head * GROUP + heads)[:, None] * DIM
    q = rotated(
        q_at, (heads < GROUP)[:, None], q_weights, q_partner_weights, cos, signed_sin, eps, DIM, WIDTH, ROTATED, NORM
    )  # fmt: skip
    q = tl.trans(q.to(kv.dtype.element_ty))
    k_at = qkv + (KV_HEADS * GROUP + kv_head) * DIM + tl.zeros([1, 1], tl.int32)
    one = tl.full([1, 1], 1, tl.int1)
    key = rotated(k_at, one, k_weights, k_partner_weights, cos, signed_sin, eps, DIM, WIDTH, ROTATED, NORM)
    key = key.to(kv.dtype.element_ty)
    value = tl.load(k_at + KV_HEADS * DIM + dims[None, :], mask=is_dim, other=0.0)
    if has_last:
        page = tl.load(table + position // PAGE).to(tl.int64)
        key_ptrs = kv + page * page_stride + (kv_head * PAGE + position % PAGE) * DIM + dims[None, :]
        tl.store(key_ptrs, key, mask=is_dim)
        tl.store(key_ptrs + value_offset, value, mask=is_dim)
    is_out = (dims < DIM)[:, None] & (heads < GROUP)[None, :]
    at_out = heads[None, :] * DIM + dims[:, None]
    out += row.to(tl.int64) * out_stride + kv_head * GROUP * DIM
    if PARTS == 1:
        peak, total, acc = empty_softmax(ROWS, WIDTH, 0)
        all_peak, all_total, all_acc = peak, total, acc
        for at in range(first_tile, last_tile, TILE):
            keys, values = load_tile(
                kv, table, kv_head, at, begin, position, page_stride, value_offset, PAGE, DIM, WIDTH, TILE,
                WINDOW > 0, WINDOW,
            )  # fmt: skip
            peak, total, acc = _add_earlier_tile(
                q, keys, values, at, begin, scale, peak, total, acc, TILE, WINDOW, CAP
            )  # fmt: skip
            if FINE > 0:  # noqa: SIM102 (known when compiled)
                if ends_split(at + TILE, FINE, NUM_FINE, COARSE):
                    all_peak, all_total, all_acc = merge_split(all_peak, all_total, all_acc, peak, total, acc, 0, False)
                    peak, total, acc = empty_softmax(ROWS, WIDTH, 0)
        if not EARLY:
            last_keys, last_values = load_tile(
                kv, table, kv_head, last_tile, begin, position, page_stride, value_offset, PAGE, DIM, WIDTH, TILE,
                True, WINDOW,
            )  # fmt: skip
        peak, total, acc = _add_last_tile(
            q, last_keys, last_values, key, value, last_tile, begin, position, scale, peak, total, acc,
            TILE, WINDOW, CAP,
        )  # fmt: skip
        if FINE > 0:
            peak, total, acc = merge_split(all_peak, all_total, all_acc, peak, total, acc, 0, False)
        if SINKS:
            head_sinks = load_sinks(sinks, kv_head * GROUP + heads, heads < GROUP)
            total, acc = add_sinks(peak, total, acc, head_sinks, 0)
        tl.store(out + at_out, normalised(total, acc, 0).to(out.dtype.element_ty), mask=is_out)
    else:
        owner = row * KV_HEADS + kv_head
        first = owner.to(tl.int64) * max_splits
        for split in range(first_split + part, num_splits, PARTS):
            peak, total, acc = empty_softmax(ROWS, WIDTH, 0)
            end = tl.minimum(split_start(split + 1, FINE, NUM_FINE, COARSE), last_tile)
            start = split_start(split, FINE, NUM_FINE, COARSE)
            if WINDOW > 0:
                start = tl.maximum(start, first_tile)
            for at in range(start, end, TILE):
                keys, values = load_tile(
                    kv, table, kv_head, at, begin, position, page_stride, value_offset, PAGE, DIM, WIDTH, TILE,
                    WINDOW > 0, WINDOW,
                )  # fmt: skip
                peak, total, acc = _add_earlier_tile(
                    q, keys, values, at, begin, scale, peak, total, acc, TILE, WINDOW, CAP
                )  # fmt: skip
            if split == num_splits - 1:
                if not EARLY:
                    last_keys, last_values = load_tile(
                        kv, table, kv_head, last_tile, begin, position, page_stride, value_offset, PAGE, DIM, WIDTH, TILE,
                        True, WINDOW,
                    )  # fmt: skip
                peak, total, acc = _add_last_tile(
                    q, last_keys, last_values, key, value, last_tile, begin, position, scale, peak, total, acc,
                    TILE, WINDOW, CAP,
                )  # fmt: skip
            at_split = (first + split) * GROUP
            tl.store(partials + at_split * DIM + at_out, acc, mask=is_out)
            tl.store(peaks + at_split + heads, peak, mask=heads < GROUP)
            tl.store(totals + at_split + heads, total, mask=heads < GROUP)
        tl.debug_barrier()
        ticket = tl.atomic_add(tickets + owner, 1, sem="acq_rel")
        if ticket == tl.minimum(num_seen, PARTS) - 1:
            tl.store(tickets + owner, 0)
            _merge_all(
                partials, peaks, totals, out, sinks + kv_head * GROUP, first, first_split, num_splits,
                GROUP, MERGE_ROWS, DIM, WIDTH, AT_ONCE, SINKS,
            )  # fmt: skip


def decode_attention(
    qkv: torch.Tensor,
    kv: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    plan: DecodePlan,
    scratch: DecodeScratch,
    *,
    scoring: Scoring | None = None,
    overlap: bool = False,
) -> None:
    """Computes `Ops.decode_attention`. `tables` [batch, blocks] and `lengths` [batch] are int32; lengths count the new
    token. `norms` are the weights for heads of q and k, `rotary` cosines and sines, float32 [positions, rotated / 2].
    out [batch, heads, head_dim]. Without `scoring` scores are divided by the root of the head's size. A row of length 0
    is padding: nothing is read or written for it.

    With `overlap` the launch begins while the kernel before it ends. Of the inputs, that kernel may write only `qkv`:
    lengths, tables and the history are read at once.
    """
    check_kv_layout(kv)
    batch, num_heads, dim = out.shape
    _, _, num_kv_heads, page, _ = kv.shape
    splits, group = plan.splits, num_heads // num_kv_heads
    assert plan.parts == 1 or (not splits.is_whole and batch <= len(scratch.tickets)), "programs that share a row"
    scoring = scoring or Scoring(dim**-0.5)
    q_norm, k_norm, cos, sin = head_tensors(norms, rotary, qkv)
    launch(
        _decode_attention, (num_kv_heads, batch, plan.parts),
        qkv, kv, tables, lengths, out, q_norm, k_norm, cos, sin, cos if scoring.sinks is None else scoring.sinks,
        scratch.partials, scratch.peaks, scratch.totals, scratch.tickets,
        LOG2_E * scoring.scale, eps, qkv.stride(0), tables.stride(0), kv.stride(0), kv.stride(1), out.stride(0),
        scratch.peaks.shape[2],
        KV_HEADS=num_kv_heads, GROUP=group, ROWS=max(MIN_DOT_COLUMNS, triton.next_power_of_2(group)),
        MERGE_ROWS=triton.next_power_of_2(group), PAGE=page, DIM=dim, WIDTH=triton.next_power_of_2(dim),
        TILE=splits.tile, FINE=splits.fine, NUM_FINE=splits.num_fine, COARSE=splits.coarse, PARTS=plan.parts,
        **head_sizes(norms, rotary), **scoring_flags(scoring), PDL=overlap, EARLY=plan.loads_early, AT_ONCE=_MERGED_AT_ONCE,
        num_warps=plan.num_warps, num_stages=plan.num_stages, launch_pdl=overlap, enable_fp_fusion=False,
    )  # fmt: skip
