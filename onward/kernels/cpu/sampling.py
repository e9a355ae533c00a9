"""Samples the next token from logits: greedy, or by one random number from the cumulative distribution.

There is one number in [0, 1) per (seed, choice, position), so it does not depend on batch, slot or thread. Tokens are
visited in the order of their ids, and the row's logits alone decide the order of all sums. Among equals the lowest id
wins, and a cut (top-k, top-p) keeps all tokens that are as likely as the last one it keeps.

Cuts are found by bisection over the bits of a weight, which order floats by size. Mostly they fall among a few hundred
candidates, which are picked out first. If they do not, the whole row is searched.
"""

import numpy as np
from numba.np.numpy_support import carray

from onward.kernels.cpu import simd
from onward.kernels.cpu.jit import Kernel, inlined_kernel_function, kernel_function, out_of_line
from onward.kernels.cpu.phases import claim_items, mark_finished, wait_for_phase

_CHUNK = 1024
_CANDIDATE = np.float32(2.0**-12)
"""The least weight of a candidate, relative to the likeliest token's."""
_MAX_CANDIDATES = 4096
_BITS_OF_ONE = 0x3F800000

CONTEXT = np.dtype(
    [
        ("count", np.int64),
        ("vocab_size", np.int64),
        ("stride", np.int64),
        ("logits", np.int64),  # float32 [count, stride]
        ("temperatures", np.int64),  # float32
        ("top_ks", np.int64),  # int64
        ("top_ps", np.int64),  # float64
        ("min_ps", np.int64),  # float32
        ("seeds", np.int64),  # uint64
        ("choices", np.int64),
        ("positions", np.int64),
        ("token_ids", np.int64),  # int64: the result
        ("is_valid", np.int64),  # uint8: 0 where the logits are not numbers
        ("scratch", np.int64),  # float32 [threads, scratch_stride]
        ("scratch_stride", np.int64),
        ("work", np.int64),
    ],
    align=True,
)


def scratch_size(vocab_size: int) -> int:
    """Returns the floats of one thread: weights of all tokens, in whole chunks, and weights and ids of candidates."""
    return -(-vocab_size // _CHUNK) * _CHUNK + 2 * (_MAX_CANDIDATES + _CHUNK)


@inlined_kernel_function
def _mix(x):
    """Mixes 64 bits: a bijection in which every input bit changes half of the output's (splitmix64's finalizer)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@inlined_kernel_function
def _uniform(seed, choice, position):
    """Returns a number in [0, 1), with 53 bits."""
    step = np.uint64(0x9E3779B97F4A7C15)
    state = _mix(seed + step)
    state = _mix((state ^ choice) + step)
    state = _mix((state ^ position) + step)
    return np.float64(state >> np.uint64(11)) * 2.0**-53


@kernel_function
def _peak(logits, at, size):
    """Returns the largest logit, or NaN if any is NaN or plus infinity."""
    infinity = np.float32(np.inf)
    high, num_bad = simd.splat(-infinity), simd.splat_i32(np.int32(0))
    whole = size // 16 * 16
    for i in range(0, whole, 16):
        x = simd.load(logits, at + i)
        high = simd.maximum(high, x)
        num_bad = simd.count_not_below(num_bad, x, infinity)
    top, bad = simd.max_lanes(high), simd.sum_lanes_i32(num_bad) != 0
    for i in range(whole, size):
        x = logits[at + i]
        bad |= not (x < infinity)
        top = max(top, x)
    return np.float32(np.nan) if bad else top


@inlined_kernel_function
def _first_of(logits, at, size, value):
    for i in range(size):
        if logits[at + i] == value:
            return i
    return 0


@kernel_function
def _weigh(logits, at, size, peak, temperature, weights):
    """Writes weights relative to the likeliest token's, which gets 1, with zeros after the last. Returns how many there
    are, zeros included."""
    inverse, top = simd.splat(np.float32(1.0) / temperature), simd.splat(peak)
    whole = size // 16 * 16
    for i in range(0, whole, 16):
        simd.store(weights, i, simd.exp((simd.load(logits, at + i) - top) * inverse))
    for i in range(whole, size):
        weights[i] = simd.max_lanes(simd.exp((simd.splat(logits[at + i]) - top) * inverse))
    return _pad(weights, size)


@inlined_kernel_function
def _pad(weights, size):
    """Fills the last chunk with zeros. Returns its end."""
    end = (size + _CHUNK - 1) // _CHUNK * _CHUNK
    for i in range(size, end):
        weights[i] = np.float32(0.0)
    return end


@kernel_function
def _mass_from(weights, size, lowest):
    """Returns the sum of the weights that are not below `lowest`. It never decreases for a smaller `lowest`. `size` is
    whole chunks."""
    out_of_line()
    mass = np.float64(0.0)
    for chunk in range(0, size, _CHUNK):
        total = simd.splat(np.float32(0.0))
        for i in range(chunk, chunk + _CHUNK, 16):
            total = total + simd.keep_not_below(simd.load(weights, i), lowest)
        mass += simd.sum_lanes(total)
    return mass


@kernel_function
def _count_from(weights, size, lowest):
    out_of_line()
    total = simd.splat_i32(np.int32(0))
    for i in range(0, size, 16):
        total = simd.count_not_below(total, simd.load(weights, i), lowest)
    return np.int64(simd.sum_lanes_i32(total))


@kernel_function
def _cut(weights, size, num_kept, mass_kept):
    """Returns the greatest weight such that `num_kept` tokens (or, if that is 0, a mass of `mass_kept`) are not below
    it."""
    low, high = np.int64(0), np.int64(_BITS_OF_ONE) + 1  # enough from `low` on, not from `high` on
    while high - low > 1:
        middle = (low + high) // 2
        lowest = simd.float_of_bits(np.int32(middle))
        if num_kept > 0:
            is_enough = _count_from(weights, size, lowest) >= num_kept
        else:
            is_enough = _mass_from(weights, size, lowest) >= mass_kept
        if is_enough:
            low = middle
        else:
            high = middle
    return simd.float_of_bits(np.int32(low))


@kernel_function
def _drop_below(weights, size, lowest):
    for i in range(0, size, 16):
        simd.store(weights, i, simd.keep_not_below(simd.load(weights, i), lowest))


@kernel_function
def _pick_out(weights, size, lowest, candidates, ids):
    """Copies the weights that are not below `lowest`, in order. Returns how many there are; if they do not fit, a
    number above `_MAX_CANDIDATES`."""
    count = 0
    for block in range(0, size, 16):
        if simd.max_lanes(simd.load(weights, block)) >= lowest:
            for i in range(block, block + 16):
                if weights[i] >= lowest:
                    if count == _MAX_CANDIDATES:
                        return count + 1
                    candidates[count] = weights[i]
                    ids[count] = i
                    count += 1
    return count


@kernel_function
def _token_at(weights, size, point):
    """Returns the token whose share contains `point`, a number below the sum of all weights."""
    start = 0
    while start + _CHUNK < size:
        share = _mass_from(simd.shifted(weights, start), _CHUNK, np.float32(0.0))
        if point < share:
            break
        point -= share
        start += _CHUNK
    for i in range(start, start + _CHUNK):
        w = np.float64(weights[i])
        if point < w:
            return i
        point -= w
    # Rounding may leave a small rest of `point`: the result is then the last token with any weight.
    last = size - 1
    while last > 0 and not weights[last] > np.float32(0.0):
        last -= 1
    return last


@kernel_function
def _draw_from(weights, size, top_k, top_p, min_p, number):
    """Applies the cuts, then samples. `size` is whole chunks, with zeros where there is no token."""
    zero = np.float32(0.0)
    if top_k > 0:
        _drop_below(weights, size, _cut(weights, size, top_k, 0.0))
    total = _mass_from(weights, size, zero)
    if top_p < 1.0:
        _drop_below(weights, size, _cut(weights, size, 0, top_p * total))
    if min_p > zero:
        _drop_below(weights, size, min_p)
    return _token_at(weights, size, number * _mass_from(weights, size, zero))


@kernel_function
def _choose(c, row, at, peak, weights):
    size = c.vocab_size
    top_k, top_p = simd.int64s(c.top_ks)[row], simd.doubles(c.top_ps)[row]
    min_p = simd.floats(c.min_ps)[row]
    seed, choice = simd.uint64s(c.seeds)[row], simd.uint64s(c.choices)[row]
    number = _uniform(seed, choice, simd.uint64s(c.positions)[row])
    if top_k >= size:
        top_k = 0
    padded = _weigh(simd.floats(c.logits), at, size, peak, simd.floats(c.temperatures)[row], weights)
    if top_k > 0 or top_p < 1.0 or min_p >= _CANDIDATE:
        candidates = simd.shifted(weights, padded)
        ids = simd.as_int32s(candidates, _MAX_CANDIDATES + _CHUNK)
        lowest = min_p if top_k == 0 and top_p >= 1.0 else _CANDIDATE
        count = _pick_out(weights, padded, lowest, candidates, ids)
        if count <= _MAX_CANDIDATES and count >= top_k:
            end = _pad(candidates, count)
            mass = _mass_from(candidates, end, np.float32(0.0))
            if top_k > 0:
                return np.int64(ids[_draw_from(candidates, end, top_k, top_p, min_p, number)])
            # top-p keeps a share of the mass of all tokens, candidates or not.
            wanted = top_p * _mass_from(weights, padded, np.float32(0.0)) if top_p < 1.0 else 0.0
            if mass >= wanted:
                if top_p < 1.0:
                    _drop_below(candidates, end, _cut(candidates, end, 0, wanted))
                return np.int64(ids[_draw_from(candidates, end, 0, 1.0, min_p, number)])
    return np.int64(_draw_from(weights, padded, top_k, top_p, min_p, number))


def _sample(thread, context):
    c = carray(context, 1)[0]
    work, logits = simd.int64s(c.work), simd.floats(c.logits)
    token_ids, is_valid = simd.int64s(c.token_ids), simd.uint8s(c.is_valid)
    row = claim_items(work, 0, 0, 1)
    while row < c.count:
        at = row * c.stride
        peak = _peak(logits, at, c.vocab_size)
        is_valid[row] = peak > np.float32(-np.inf)
        token_ids[row] = 0
        if is_valid[row] and simd.floats(c.temperatures)[row] <= np.float32(0.0):
            token_ids[row] = _first_of(logits, at, c.vocab_size, peak)
        elif is_valid[row]:
            token_ids[row] = _choose(c, row, at, peak, simd.shifted(simd.floats(c.scratch), thread * c.scratch_stride))
        mark_finished(work, 0, 1)
        row = claim_items(work, 0, 0, 1)
    wait_for_phase(work, 0, c.count)


sample = Kernel(_sample, CONTEXT)
"""Samples one token per row of logits."""
