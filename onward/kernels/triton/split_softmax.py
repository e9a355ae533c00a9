"""The arithmetic that decode and chunk attention share, so that a row has the same bits in both.

A history is cut into splits at fixed positions. Each split has a running softmax of its own over tiles of positions, and
splits are merged one by one, in order. Whether one program computes the splits in turn, or many programs do so at once,
changes no operation and no operand:

    history   |-- split 0: tile, tile, … --|-- split 1 --|-- split 2: tile, last tile |
    result    merge(merge(split 0, split 1), split 2)

The first splits are short, so that many programs read a short history too. Later splits are long, so that a long
history needs few merges.

Three rules make the bits independent of how Triton lays a tile out over warps and threads:
  * sums over positions and dimensions are made by `halving_sum`, whose additions have two operands each;
  * matrix products add along their inner axis in an order that no plan changes, and never across warps;
  * kernels are compiled with `enable_fp_fusion=False`, and a fused multiply-add is written as `tl.fma`.
`tests/kernels/test_compiled_order.py` checks the compiled kernels against these rules, without a device.

With a sliding window a row begins at the tile and the split in which its window begins. Splits and tiles still lie at
absolute positions, so a row's visible positions are in the same lanes of the same tiles whichever kernel computes it. A
tile of chunk attention serves rows whose windows begin at different tiles. So a row may get tiles and splits without
any visible position before its first one. They leave its softmax as `empty_softmax` made it: the peak stays minus
infinity, `add_tile` with MASK multiplies zeros by zeros, and so does `merge_split` with EMPTY. From its first tile on,
the operations of the row equal those of a program that begins there.
"""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import triton
import triton.language as tl

from onward.kernels.ops import Scoring

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Splits:
    """The positions at which a history is cut. All fields decide the order of sums, so deterministic mode has one value
    for all batches."""

    fine: int
    """Positions of each of the first `num_fine` splits."""
    num_fine: int
    coarse: int
    """Positions of each later split."""
    tile: int = 32
    """Positions of one step of the running softmax."""

    def __post_init__(self) -> None:
        assert self.fine % self.tile == 0
        assert self.coarse % self.tile == 0
        assert self.fine * self.num_fine % max(1, self.coarse) == 0, "coarse splits begin at multiples of their size"

    @property
    def is_whole(self) -> bool:
        return self.fine == 0

    def count(self, length: int) -> int:
        """Returns the number of splits of a history of this length."""
        if self.is_whole:
            return 1
        fine = min(self.num_fine, -(-length // self.fine))
        return fine + max(0, -(-(length - self.num_fine * self.fine) // self.coarse))


def scoring_flags(scoring: Scoring) -> dict[str, float]:
    """Returns the options of `scoring` that kernels are compiled for. A model without any of them gets kernels without
    their code."""
    return {
        "WINDOW": scoring.window or 0,
        "CAP": LOG2_E * (scoring.softcap or 0.0),
        "SINKS": scoring.sinks is not None,
    }


FIXED_SPLITS = Splits(fine=128, num_fine=16, coarse=256)
"""The splits of deterministic mode. `KERNEL_VERSION` changes with them."""
WHOLE = Splits(fine=0, num_fine=0, coarse=0)
"""One split, however long the history is."""


@triton.constexpr_function
def _log2(size):
    return size.bit_length() - 1


@triton.jit
def split_start(split, FINE: tl.constexpr, NUM_FINE: tl.constexpr, COARSE: tl.constexpr):
    """Returns the first position of a split."""
    return tl.where(split < NUM_FINE, split * FINE, NUM_FINE * FINE + (split - NUM_FINE) * COARSE)


@triton.jit
def split_of(position, FINE: tl.constexpr, NUM_FINE: tl.constexpr, COARSE: tl.constexpr):
    """Returns the split of a position."""
    behind = position - NUM_FINE * FINE
    return tl.where(behind < 0, position // FINE, NUM_FINE + behind // COARSE)


@triton.jit
def ends_split(end, FINE: tl.constexpr, NUM_FINE: tl.constexpr, COARSE: tl.constexpr):
    """Returns whether a split ends before the position `end`."""
    return tl.where(end <= NUM_FINE * FINE, end % FINE, end % COARSE) == 0


@triton.jit
def halving_sum(x, AXIS: tl.constexpr, NEIGHBOURS_FROM: tl.constexpr, NEIGHBOURS_TO: tl.constexpr):
    """Returns the sum along an axis of a matrix. Elements are added pairwise until one is left. Every addition has two
    operands, so the result is the same in every layout.

    While there are at most NEIGHBOURS_FROM and more than NEIGHBOURS_TO elements, neighbours are added to each other,
    else the upper half to the lower one. The fastest order first adds the elements of one thread."""
    OTHER: tl.constexpr = x.shape[1 - AXIS]
    LOG2_SIZE: tl.constexpr = _log2(x.shape[AXIS])
    for _ in tl.static_range(LOG2_SIZE):
        if x.shape[AXIS] <= NEIGHBOURS_FROM and x.shape[AXIS] > NEIGHBOURS_TO:
            if AXIS == 1:
                x = tl.sum(tl.reshape(x, [OTHER, x.shape[1] // 2, 2]), 2)
            else:
                x = tl.sum(tl.reshape(x, [x.shape[0] // 2, 2, OTHER]), 1)
        elif AXIS == 1:
            x = tl.sum(tl.reshape(x, [OTHER, 2, x.shape[1] // 2]), 1)
        else:
            x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2, OTHER]), 0)
    return tl.reshape(x, [OTHER])


@triton.jit
def load_tile(
    kv, table, kv_head, at, begin, end, page_stride, value_offset,
    PAGE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Loads keys and values [TILE, WIDTH] of the positions from `at` on. With MASK there are zeros from `end` on, and
    with a window also before `begin`, because blocks before it may belong to another request. WIDTH is DIM rounded up
    to a power of two; dimensions from DIM on are zeros."""
    lanes = tl.arange(0, TILE)
    dims = tl.arange(0, WIDTH)
    is_in = at + lanes < end
    if WINDOW > 0:
        is_in = is_in & (at + lanes >= begin)
    if PAGE >= TILE:
        page = tl.load(table + at // PAGE).to(tl.int64)
        rows = page * page_stride + (kv_head * PAGE + at % PAGE + lanes) * DIM
    else:
        positions = at + lanes
        if MASK:
            pages = tl.load(table + positions // PAGE, mask=is_in, other=0).to(tl.int64)
        else:
            pages = tl.load(table + positions // PAGE).to(tl.int64)
        rows = pages * page_stride + (kv_head * PAGE + positions % PAGE) * DIM
    offsets = rows[:, None] + dims[None, :]
    if MASK:
        mask = is_in[:, None] & (dims < DIM)[None, :]
        keys = tl.load(kv + offsets, mask=mask, other=0.0)
        values = tl.load(kv + value_offset + offsets, mask=mask, other=0.0)
    elif WIDTH != DIM:
        keys = tl.load(kv + offsets, mask=(dims < DIM)[None, :], other=0.0)
        values = tl.load(kv + value_offset + offsets, mask=(dims < DIM)[None, :], other=0.0)
    else:
        keys = tl.load(kv + offsets)
        values = tl.load(kv + value_offset + offsets)
    return keys, values


@triton.jit
def empty_softmax(ROWS: tl.constexpr, WIDTH: tl.constexpr, AXIS: tl.constexpr):
    """Returns (peak, total, acc) of no positions."""
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if AXIS == 1:
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
    else:
        acc = tl.zeros([WIDTH, ROWS], tl.float32)
    return peak, total, acc


@triton.jit
def _capped(scores, scale, CAP: tl.constexpr):
    """Returns CAP * tanh(scores * scale / CAP). A large exponential is infinite, and gives CAP."""
    return CAP * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (scale * (2.0 * 1.4426950408889634 / CAP)))))


@triton.jit
def add_tile(
    q, keys, values, visible, scale, peak, total, acc, AXIS: tl.constexpr, MASK: tl.constexpr, CAP: tl.constexpr
):  # fmt: skip
    """Adds a tile to a split's running softmax; scores are in units of log 2, and so is CAP, their soft-cap (0: none).
    With MASK only `visible` positions count; if all are visible, the bits are the same as without MASK.

    AXIS 1: q [rows, dims], scores [rows, positions], acc [rows, dims]; AXIS 0: all of them transposed."""
    if AXIS == 1:
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    else:
        scores = tl.dot(keys, q, input_precision="ieee")
    if CAP > 0:
        scores = _capped(scores, scale, CAP)
        scale = 1.0
    if MASK:
        scores = tl.where(visible, scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, AXIS) * scale)
    base = new_peak
    if MASK:
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # a row without visible positions so far
    weights = tl.exp2(tl.fma(scores, scale, -tl.expand_dims(base, AXIS)))
    shrink = tl.exp2(peak - base)
    # A matrix instruction's thread has neighbours, and elements that are 8 apart.
    total = tl.fma(total, shrink, halving_sum(weights, AXIS, 8, 4))
    acc = acc * tl.expand_dims(shrink, AXIS)
    if AXIS == 1:
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    else:
        acc = tl.dot(tl.trans(values), weights.to(values.dtype), acc, input_precision="ieee")
    return new_peak, total, acc


@triton.jit
def merge_split(peak, total, acc, split_peak, split_total, split_acc, AXIS: tl.constexpr, EMPTY: tl.constexpr):
    """Merges the next split into the splits before it. A split without visible positions of a row changes nothing: its
    peak is minus infinity, so that it is multiplied by zero and the others by one. EMPTY: a row may have had no visible
    position at all yet."""
    new_peak = tl.maximum(peak, split_peak)
    base = new_peak
    if EMPTY:
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    old, new = tl.exp2(peak - base), tl.exp2(split_peak - base)
    total = tl.fma(total, old, split_total * new)
    acc = tl.fma(acc, tl.expand_dims(old, AXIS), split_acc * tl.expand_dims(new, AXIS))
    return new_peak, total, acc


@triton.jit
def add_sinks(peak, total, acc, sinks, AXIS: tl.constexpr):
    """Returns the total and the values with one more score for each row, in units of log 2, which has no value."""
    new_peak = tl.maximum(peak, sinks)
    shrink = tl.exp2(peak - new_peak)
    return tl.fma(total, shrink, tl.exp2(sinks - new_peak)), acc * tl.expand_dims(shrink, AXIS)


@triton.jit
def load_sinks(sinks, heads, is_head):
    """Loads the sinks of heads, in units of log 2."""
    return tl.load(sinks + heads, mask=is_head, other=0.0) * 1.4426950408889634


@triton.jit
def normalised(total, acc, AXIS: tl.constexpr):
    """Returns the weighted mean of the values."""
    return acc * tl.expand_dims(tl.div_rn(1.0, total), AXIS)
