"""Choosing the next token from logits: greedy, or one draw from the cumulative distribution.

The draw is one number in [0, 1) per (seed, choice, position), so it knows neither batch nor slot nor thread. Tokens are
visited in the order of their ids; sums are made over fixed chunks in a fixed order. Among equals the lowest id wins, and
a cut (top-k, top-p) keeps all tokens that are as likely as the last one it keeps.
"""

import numba
import numpy as np

from onward.kernels.cpu import simd
from onward.kernels.cpu.jit import device, inlined, kernel

_CHUNK = 1024
_NUM_BUCKETS = 1 << 12
_BUCKET_SHIFT = 19
"""A positive float32's bits, shifted by this, order floats by their size in 2^12 buckets."""


@inlined
def _mix(x):
    """A bijection of 64 bits in which every input bit changes half of the output's (splitmix64's finalizer)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@inlined
def uniform(seed, choice, position):
    """In [0, 1), with 53 bits."""
    step = np.uint64(0x9E3779B97F4A7C15)
    state = _mix(seed + step)
    state = _mix((state ^ choice) + step)
    state = _mix((state ^ position) + step)
    return np.float64(state >> np.uint64(11)) * 2.0**-53


@inlined
def _peak(logits, at, size):
    """The largest logit, or NaN if any is NaN or infinite upwards."""
    high = np.float32(-np.inf)
    bad = False
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
    inverse = simd.splat(np.float32(1.0) / temperature)
    top = simd.splat(peak)
    whole = size // 16 * 16
    for i in range(0, whole, 16):
        simd.store(logits, at + i, simd.exp((simd.load(logits, at + i) - top) * inverse))
    for i in range(whole, size):
        logits[at + i] = np.exp((logits[at + i] - peak) / temperature)


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
    total = np.float64(0.0)
    for start in range(0, size, _CHUNK):
        total += _chunk_sum(weights, at + start, min(_CHUNK, size - start))
    return total


@device
def _zero_below(weights, at, size, lowest):
    for i in range(size):
        w = weights[at + i]
        weights[at + i] = w if w >= lowest else np.float32(0.0)


@device
def _cut(weights, at, size, bits, bits_at, max_count, max_mass):
    """The weight of the last token kept, when tokens are taken from the heaviest on until `max_count` are taken or
    their sum has reached `max_mass`. Only the bucket in which that happens is sorted."""
    counts = np.zeros(_NUM_BUCKETS, np.int64)
    masses = np.zeros(_NUM_BUCKETS, np.float64)
    for i in range(size):
        bucket = bits[bits_at + i] >> _BUCKET_SHIFT
        counts[bucket] += 1
        masses[bucket] += weights[at + i]
    taken, mass = np.int64(0), np.float64(0.0)
    bucket = _NUM_BUCKETS - 1
    while bucket > 0 and taken + counts[bucket] < max_count and mass + masses[bucket] < max_mass:
        taken += counts[bucket]
        mass += masses[bucket]
        bucket -= 1
    members = np.empty(counts[bucket], np.float32)
    found = 0
    for i in range(size):
        if bits[bits_at + i] >> _BUCKET_SHIFT == bucket:
            members[found] = weights[at + i]
            found += 1
    members.sort()
    for i in range(found - 1, -1, -1):
        taken += 1
        mass += members[i]
        if taken >= max_count or mass >= max_mass:
            return members[i]
    return np.float32(0.0)


@device
def _draw(weights, at, size, point):
    """The token in whose share `point`, a number below the sum of all weights, lies."""
    start = 0
    while start + _CHUNK < size:
        share = _chunk_sum(weights, at + start, _CHUNK)
        if point < share:
            break
        point -= share
        start += _CHUNK
    last = -1
    for i in range(start, size):
        w = np.float64(weights[at + i])
        if w > 0.0:
            last = i
            if point < w:
                return i
            point -= w
    # Rounding may leave a crumb; then it is the last token with any weight.
    while last < 0:
        start -= 1
        if weights[at + start] > 0.0:
            last = start
    return last


@device
def _choose(logits, bits, at, size, peak, temperature, top_k, top_p, min_p, seed, choice, position):
    _weigh(logits, at, size, peak, temperature)
    if 0 < top_k < size:
        _zero_below(logits, at, size, _cut(logits, at, size, bits, at, top_k, np.inf))
    total = _sum(logits, at, size)
    if top_p < 1.0:
        _zero_below(logits, at, size, _cut(logits, at, size, bits, at, np.int64(size), top_p * total))
        total = _sum(logits, at, size)
    if min_p > 0.0:
        _zero_below(logits, at, size, np.float32(min_p))
        total = _sum(logits, at, size)
    return _draw(logits, at, size, uniform(seed, choice, position) * total)


@kernel
def sample_rows(logits, bits, stride, size, count, temperatures, top_ks, top_ps, min_ps, seeds, choices, positions,
                token_ids, is_valid):  # fmt: skip
    """Fills `token_ids`; a row whose logits are not numbers is marked as not valid. `logits` is used up.

    `bits` is the same memory as int32, `stride` the length of a row, of which `size` entries count.
    """
    for row in numba.prange(count):
        at = row * stride
        peak = _peak(logits, at, size)
        is_valid[row] = peak > np.float32(-np.inf)
        if not is_valid[row]:
            token_ids[row] = 0
        elif temperatures[row] <= 0.0:
            token_ids[row] = _first_of(logits, at, size, peak)
        else:
            token_ids[row] = _choose(logits, bits, at, size, peak, temperatures[row], top_ks[row], top_ps[row],
                                     min_ps[row], seeds[row], choices[row], positions[row])  # fmt: skip
