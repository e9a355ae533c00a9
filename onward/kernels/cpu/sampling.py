"""Choosing the next token from logits: greedy, or one draw from the cumulative distribution.

The draw is one number in [0, 1) per (seed, choice, position), so it knows neither batch nor slot nor thread. Tokens are
visited in the order of their ids; sums are made over fixed chunks in a fixed order. Among equals the lowest id wins, and
a cut (top-k, top-p) keeps all tokens that are as likely as the last one it keeps.
"""

import numpy as np
from numba import carray

from onward.kernels.cpu import simd
from onward.kernels.cpu.jit import Kernel, device, inlined, out_of_line
from onward.kernels.cpu.phases import await_all, draw, finish

_CHUNK = 1024
_DIGIT_SHIFTS = (19, 7, 0)
"""A positive float32's bits order floats by size. They are read as three digits, of 12, 12 and 7 bits."""
_NUM_DIGITS = 1 << 12
HISTOGRAM_WORDS = 2 * _NUM_DIGITS
"""Scratch of one thread: counts (int64) and masses (float64) of each digit."""

CONTEXT = np.dtype(
    [
        ("count", np.int64),
        ("vocab_size", np.int64),
        ("stride", np.int64),
        ("logits", np.int64),  # float32 [count, stride]; used up
        ("temperatures", np.int64),  # float32
        ("top_ks", np.int64),  # int64
        ("top_ps", np.int64),  # float64
        ("min_ps", np.int64),  # float32
        ("seeds", np.int64),  # uint64
        ("choices", np.int64),
        ("positions", np.int64),
        ("token_ids", np.int64),  # int64: the result
        ("is_valid", np.int64),  # uint8: 0 where the logits are not numbers
        ("histograms", np.int64),  # [threads, HISTOGRAM_WORDS]
        ("work", np.int64),
    ],
    align=True,
)


@inlined
def _mix(x):
    """A bijection of 64 bits in which every input bit changes half of the output's (splitmix64's finalizer)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@inlined
def _uniform(seed, choice, position):
    """In [0, 1), with 53 bits."""
    step = np.uint64(0x9E3779B97F4A7C15)
    state = _mix(seed + step)
    state = _mix((state ^ choice) + step)
    state = _mix((state ^ position) + step)
    return np.float64(state >> np.uint64(11)) * 2.0**-53


@inlined
def _peak(logits, at, size):
    """The largest logit, or NaN if any is NaN or infinite upwards."""
    high, bad = np.float32(-np.inf), False
    for i in range(size):
        x = logits[at + i]
        bad |= not (x < np.float32(np.inf))
        high = max(high, x)
    return np.float32(np.nan) if bad else high


@inlined
def _first_of(logits, at, size, value):
    for i in range(size):
        if logits[at + i] == value:
            return i
    return 0


@inlined
def _weigh(logits, at, size, peak, temperature):
    """Turns logits into weights relative to the likeliest token's, which becomes 1."""
    inverse, top = simd.splat(np.float32(1.0) / temperature), simd.splat(peak)
    whole = size // 16 * 16
    for i in range(0, whole, 16):
        simd.store(logits, at + i, simd.exp((simd.load(logits, at + i) - top) * inverse))
    for i in range(whole, size):
        single = simd.exp((simd.splat(logits[at + i]) - top) * inverse)
        logits[at + i] = simd.max_lanes(single)


@inlined
def _chunk_sum(weights, at, count):
    if count == _CHUNK:
        total = simd.splat(np.float32(0.0))
        for i in range(0, _CHUNK, 16):
            total = total + simd.load(weights, at + i)
        return np.float64(simd.sum_lanes(total))
    rest = np.float64(0.0)
    for i in range(count):
        rest += weights[at + i]
    return rest


@device
def _sum(weights, at, size):
    out_of_line()
    total = np.float64(0.0)
    for start in range(0, size, _CHUNK):
        total += _chunk_sum(weights, at + start, min(_CHUNK, size - start))
    return total


@device
def _drop_below(weights, at, size, lowest):
    for i in range(size):
        w = weights[at + i]
        weights[at + i] = w if w >= lowest else np.float32(0.0)


@device
def _cut(weights, bits, at, size, counts, masses, max_count, max_mass):
    """The bits of the last weight kept, when tokens are taken from the heaviest on until `max_count` are taken or
    their sum has reached `max_mass`. Digit by digit: those above the one in which that happens are taken whole."""
    out_of_line()
    taken, mass, prefix, width = np.int64(0), np.float64(0.0), np.int64(0), np.int64(31)
    for shift in _DIGIT_SHIFTS:
        num_digits = np.int64(1) << (width - shift)
        for digit in range(num_digits):
            counts[digit] = 0
            masses[digit] = 0.0
        for i in range(size):
            b = np.int64(bits[at + i])
            if b >> width == prefix:
                digit = (b >> shift) & (num_digits - 1)
                counts[digit] += 1
                masses[digit] += weights[at + i]
        digit = num_digits - 1
        while digit > 0 and taken + counts[digit] < max_count and mass + masses[digit] < max_mass:
            taken += counts[digit]
            mass += masses[digit]
            digit -= 1
        prefix = (prefix << (width - shift)) | digit
        width = np.int64(shift)
    return prefix


@device
def _cut_below(weights, bits, at, size, lowest_bits):
    for i in range(size):
        if bits[at + i] < lowest_bits:
            weights[at + i] = np.float32(0.0)


@device
def _pick(weights, at, size, point):
    """The token in whose share `point`, a number below the sum of all weights, lies."""
    start = 0
    while start + _CHUNK < size:
        share = _chunk_sum(weights, at + start, _CHUNK)
        if point < share:
            break
        point -= share
        start += _CHUNK
    for i in range(start, size):
        w = np.float64(weights[at + i])
        if point < w:
            return i
        point -= w
    # Rounding may leave a crumb: then it is the last token with any weight.
    last = size - 1
    while last > 0 and not weights[at + last] > np.float32(0.0):
        last -= 1
    return last


@device
def _choose(c, row, at, peak, counts, masses):
    logits, bits, size = simd.floats(c.logits), simd.int32s(c.logits), c.vocab_size
    top_k, top_p = simd.int64s(c.top_ks)[row], simd.doubles(c.top_ps)[row]
    min_p = simd.floats(c.min_ps)[row]
    _weigh(logits, at, size, peak, simd.floats(c.temperatures)[row])
    if 0 < top_k < size:
        _cut_below(logits, bits, at, size, _cut(logits, bits, at, size, counts, masses, top_k, np.inf))
    total = _sum(logits, at, size)
    if top_p < 1.0:
        _cut_below(logits, bits, at, size, _cut(logits, bits, at, size, counts, masses, size, top_p * total))
        total = _sum(logits, at, size)
    if min_p > 0.0:
        _drop_below(logits, at, size, min_p)
        total = _sum(logits, at, size)
    seed, choice = simd.uint64s(c.seeds)[row], simd.uint64s(c.choices)[row]
    return _pick(logits, at, size, _uniform(seed, choice, simd.uint64s(c.positions)[row]) * total)


def _sample(thread, context):
    c = carray(context, 1)[0]
    work, logits = simd.int64s(c.work), simd.floats(c.logits)
    token_ids, is_valid = simd.int64s(c.token_ids), simd.uint8s(c.is_valid)
    counts = simd.int64s(c.histograms + thread * HISTOGRAM_WORDS * 8)
    masses = simd.doubles(c.histograms + (thread * HISTOGRAM_WORDS + _NUM_DIGITS) * 8)
    row = draw(work, 0, 1)
    while row < c.count:
        at = row * c.stride
        peak = _peak(logits, at, c.vocab_size)
        is_valid[row] = peak > np.float32(-np.inf)
        token_ids[row] = 0
        if is_valid[row] and simd.floats(c.temperatures)[row] <= np.float32(0.0):
            token_ids[row] = _first_of(logits, at, c.vocab_size, peak)
        elif is_valid[row]:
            token_ids[row] = _choose(c, row, at, peak, counts, masses)
        finish(work, 0, 1)
        row = draw(work, 0, 1)
    await_all(work, 0, c.count)


sample = Kernel(_sample, CONTEXT)
"""One token per row of logits."""
