"""Samples the next token on the device, as `kernels.cpu.sampling` does: greedy, or by one random number from the
cumulative distribution over token ids, with one number in [0, 1) per (seed, choice, position).

A row's token depends on that row alone. Weights are added up as integers (`_fixed`), so that a sum is the same in any
order and in any layout. No bit depends on whether other rows have cuts, or whether another row needs logits in float32.
A row without cuts skips their kernels. Among equals the lowest id wins, and a cut (top-k, top-p) keeps all tokens that
are as likely as the last one it keeps. Exponentials are not rounded as on the CPU, so a token may differ if the random
number falls on a border between two tokens.

    chunks   |-- 4096 logits --|-- … --|      1. each chunk's peak, its first index, and its mass
    cuts     (if any)                         2. candidates; among them the least weight that is kept; masses again
    sample                                    3. the chunk in which the number falls, then the token in it
"""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from onward.kernels.triton.kernel_launch import launch

_CHUNK = 4096
_BISECTIONS = 31
"""Weights lie in [0, 1], whose bit patterns are 0 to 0x3F800000."""
_CANDIDATE = 2.0**-12
"""The least weight of a candidate, relative to the likeliest token's."""
_CANDIDATES = 256
"""Candidates of one chunk, at most. If there are more, or cuts fall below them, the whole row is searched."""


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """One value per row: float32 temperatures (0: greedy), int64 the others; seeds are read as 64 bits without sign."""

    temperatures: torch.Tensor
    seeds: torch.Tensor
    choices: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class FilterParams:
    """One value per row: int32 top_ks (0: all), float32 top_ps (1: all) and min_ps (0: all)."""

    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor


@dataclass(frozen=True, slots=True)
class SampleScratch:
    peaks: torch.Tensor
    firsts: torch.Tensor
    masses: torch.Tensor
    lowest: torch.Tensor
    candidates: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, vocab_size: int, device: str) -> "SampleScratch":
        shape = (rows, triton.cdiv(vocab_size, _CHUNK))
        return cls(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(shape, dtype=torch.int64, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty((*shape, _CANDIDATES), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
        )


@triton.jit
def _fixed(weights):
    """Returns weights in [0, 1] as integers, in units of 2 ** -30, so that their sums are exact."""
    return (weights * 1073741824.0).to(tl.int32).to(tl.int64)


@triton.jit
def _inverse(temperature):
    """Returns 1 / temperature, or 1 for greedy rows: they need no weights, and 1 keeps their arithmetic finite."""
    return tl.where(temperature > 0.0, 1.0 / temperature, 1.0)


@triton.jit
def _survey(logits, temperatures, peaks, firsts, masses, lowest, stride, size, num_chunks, CHUNK: tl.constexpr):
    chunk, row = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < size, other=-float("inf")).to(tl.float32)
    num_bad = tl.sum(tl.where(x < float("inf"), 0, 1), 0)
    peak = tl.max(x, 0)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    mass = tl.sum(_fixed(tl.exp((x - base) * _inverse(tl.load(temperatures + row)))), 0)
    first = tl.min(tl.where(x == peak, ids, 0x7FFFFFFF), 0)
    at = row * num_chunks + chunk
    tl.store(peaks + at, tl.where(num_bad > 0, float("nan"), peak))
    tl.store(firsts + at, first)
    tl.store(masses + at, mass)
    if chunk == 0:
        tl.store(lowest + row, 0.0)


@triton.jit
def _shares(peaks, masses, row, num_chunks, peak, inverse, CHUNKS: tl.constexpr):
    """Returns the chunks' masses relative to the row's peak, as integers in units of 2 ** -40."""
    chunks = tl.arange(0, CHUNKS)
    at = row * num_chunks + chunks
    own = tl.load(peaks + at, mask=chunks < num_chunks, other=-float("inf"))
    mass = tl.load(masses + at, mask=chunks < num_chunks, other=0)
    return (mass.to(tl.float64) * 1024.0 * tl.exp((own - peak) * inverse).to(tl.float64)).to(tl.int64)


@triton.jit
def _row_peak(peaks, row, num_chunks, CHUNKS: tl.constexpr):
    chunks = tl.arange(0, CHUNKS)
    return tl.max(tl.load(peaks + row * num_chunks + chunks, mask=chunks < num_chunks, other=-float("inf")), 0)


@triton.jit
def _mass_from(logits, size, peak, inverse, lowest, floor, CHUNK: tl.constexpr):
    """Returns the number and the mass of the tokens whose weight is at least `lowest` and at least `floor`."""
    count = tl.zeros([], tl.int32)
    mass = tl.zeros([], tl.int64)
    for at in range(0, size, CHUNK):
        ids = at + tl.arange(0, CHUNK)
        x = tl.load(logits + ids, mask=ids < size, other=-float("inf")).to(tl.float32)
        weights = tl.exp((x - peak) * inverse)
        is_kept = (weights >= lowest) & (weights >= floor)
        count += tl.sum((is_kept & (ids < size)).to(tl.int32), 0)
        mass += tl.sum(_fixed(tl.where(is_kept, weights, 0.0)), 0)
    return count, mass


@triton.jit
def _pick_out(
    logits, temperatures, top_ks, top_ps, peaks, candidates, counts, stride, size, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROOM: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Stores the weights of one chunk's candidates, in order, and the number of candidates, even if they do not all
    fit."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    if (tl.load(top_ks + row) == 0) & (tl.load(top_ps + row) >= 1.0):
        return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < size, other=-float("inf")).to(tl.float32)
    peak = _row_peak(peaks, row, num_chunks, CHUNKS)
    weights = tl.exp((x - peak) * _inverse(tl.load(temperatures + row)))
    is_candidate = weights >= LEAST
    places = tl.cumsum(is_candidate.to(tl.int32), 0) - 1
    at = row * num_chunks + chunk
    tl.store(candidates + at.to(tl.int64) * ROOM + places, weights, mask=is_candidate & (places < ROOM))
    tl.store(counts + at, tl.sum(is_candidate.to(tl.int32), 0))


@triton.jit
def _mass_of(weights, lowest):
    return tl.sum(tl.sum(_fixed(tl.where(weights >= lowest, weights, 0.0)), 1), 0)


@triton.jit
def _cut_candidates(weights, top_k, wanted, BISECTIONS: tl.constexpr):
    """Returns the greatest weight such that `top_k` of these weights (or, if that is 0, a mass of `wanted`) are not
    below it."""
    low, high = tl.full([], 0, tl.int32), tl.full([], 0x3F800001, tl.int32)
    for _ in range(BISECTIONS):
        middle = low + (high - low) // 2
        lowest = middle.to(tl.float32, bitcast=True)
        if top_k > 0:
            is_enough = tl.sum(tl.sum((weights >= lowest).to(tl.int32), 1), 0) >= top_k
        else:
            is_enough = _mass_of(weights, lowest) >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low.to(tl.float32, bitcast=True)


@triton.jit
def _cut_row(logits, size, peak, inverse, floor, top_k, wanted, CHUNK: tl.constexpr, BISECTIONS: tl.constexpr):
    """Does the same as `_cut_candidates` among all tokens with a weight of at least `floor`; slow."""
    low, high = tl.full([], 0, tl.int32), tl.full([], 0x3F800001, tl.int32)
    for _ in range(BISECTIONS):
        middle = low + (high - low) // 2
        count, mass = _mass_from(logits, size, peak, inverse, middle.to(tl.float32, bitcast=True), floor, CHUNK)
        if top_k > 0:
            is_enough = count >= top_k
        else:
            is_enough = mass >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low.to(tl.float32, bitcast=True)


@triton.jit
def _cut(
    logits, temperatures, top_ks, top_ps, min_ps, peaks, masses, candidates, counts, lowest, stride, size, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROOM: tl.constexpr, BISECTIONS: tl.constexpr,
):  # fmt: skip
    """Finds the least weight that top-k, then top-p of the remaining tokens, then min-p keep."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    top_k = tl.where(top_k < size, top_k, 0)
    kept = tl.full([], 0.0, tl.float32)
    if (top_k > 0) | (top_p < 1.0):
        peak = _row_peak(peaks, row, num_chunks, CHUNKS)
        inverse = _inverse(tl.load(temperatures + row))
        chunks, lanes = tl.arange(0, CHUNKS), tl.arange(0, ROOM)
        at = row * num_chunks + chunks
        found = tl.load(counts + at, mask=chunks < num_chunks, other=0)
        weights = tl.load(
            candidates + at.to(tl.int64)[:, None] * ROOM + lanes[None, :],
            mask=lanes[None, :] < found[:, None],
            other=0.0,
        )
        num_found = tl.where(tl.max(found, 0) <= ROOM, tl.sum(found, 0), 0)
        total = tl.sum(_shares(peaks, masses, row, num_chunks, peak, inverse, CHUNKS), 0) // 1024
        if top_k > 0:
            if num_found >= top_k:
                kept = _cut_candidates(weights, top_k, total, BISECTIONS)
                total = _mass_of(weights, kept)
            else:
                kept = _cut_row(logits, size, peak, inverse, 0.0, top_k, total, CHUNK, BISECTIONS)
                _num_kept, total = _mass_from(logits, size, peak, inverse, kept, 0.0, CHUNK)
        if top_p < 1.0:
            wanted = (total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
            weights = tl.where(weights >= kept, weights, 0.0)
            if (num_found > 0) & (_mass_of(weights, 0.0) >= wanted):
                least = _cut_candidates(weights, 0, wanted, BISECTIONS)
            else:
                least = _cut_row(logits, size, peak, inverse, kept, 0, wanted, CHUNK, BISECTIONS)
            kept = tl.maximum(kept, least)
    tl.store(lowest + row, tl.maximum(kept, tl.load(min_ps + row)))


@triton.jit
def _resurvey(
    logits, temperatures, peaks, masses, lowest, stride, size, num_chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """Computes the chunks' masses again, for the tokens that the cuts keep."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    least = tl.load(lowest + row)
    if least <= 0.0:
        return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < size, other=-float("inf")).to(tl.float32)
    peak = _row_peak(peaks, row, num_chunks, CHUNKS)
    own = tl.load(peaks + row * num_chunks + chunk)
    inverse = _inverse(tl.load(temperatures + row))
    mass = tl.sum(_kept(x, peak, tl.where(own == -float("inf"), 0.0, own), inverse, least), 0)
    tl.store(masses + row * num_chunks + chunk, mass)


@triton.jit
def _kept(x, peak, own_peak, inverse, least):
    """Returns the weights of a chunk relative to its own peak, as integers. Tokens that the row's cuts leave out get
    zero."""
    is_kept = tl.exp((x - peak) * inverse) >= least
    return _fixed(tl.where(is_kept, tl.exp((x - own_peak) * inverse), 0.0))


@triton.jit
def _mix(x):
    """Mixes 64 bits: a bijection in which every input bit changes half of the output's (splitmix64's finalizer)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, choice, position):
    """Returns a number in [0, 1), with 53 bits."""
    state = _mix(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    state = _mix((state ^ choice.to(tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15)
    state = _mix((state ^ position.to(tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15)
    return (state >> 11).to(tl.int64, bitcast=True).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _draw(
    logits, temperatures, seeds, choices, positions, peaks, firsts, masses, lowest, token_ids, is_valid,
    stride, size, num_chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunks = tl.arange(0, CHUNKS)
    is_chunk = chunks < num_chunks
    at = row * num_chunks + chunks
    chunk_peaks = tl.load(peaks + at, mask=is_chunk, other=-float("inf"))
    num_bad = tl.sum(tl.where(chunk_peaks < float("inf"), 0, 1), 0)
    peak = tl.max(chunk_peaks, 0)
    valid = (num_bad == 0) & (peak > -float("inf"))
    temperature = tl.load(temperatures + row)
    token = tl.min(tl.where(chunk_peaks == peak, tl.load(firsts + at, mask=is_chunk, other=0), 0x7FFFFFFF), 0)
    if valid & (temperature > 0.0):
        inverse = 1.0 / temperature
        number = _uniform(tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row))
        shares = _shares(peaks, masses, row, num_chunks, peak, inverse, CHUNKS)
        total = tl.sum(shares, 0)
        point = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
        chunk = tl.sum((tl.cumsum(shares, 0) <= point).to(tl.int32), 0)
        # The point within the chunk's share is scaled to a point within the chunk's own mass.
        before = tl.sum(tl.where(chunks < chunk, shares, 0), 0)
        share = tl.sum(tl.where(chunks == chunk, shares, 0), 0)
        mass = tl.load(masses + row * num_chunks + chunk)
        own_peak = tl.load(peaks + row * num_chunks + chunk)
        inner = ((point - before).to(tl.float64) / share.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < size, other=-float("inf")).to(tl.float32)
        ends = tl.cumsum(_kept(x, peak, own_peak, inverse, tl.load(lowest + row)), 0)
        token = chunk * CHUNK + tl.sum((ends <= tl.minimum(inner, mass - 1)).to(tl.int32), 0)
    tl.store(token_ids + row, tl.where(valid, token, 0).to(token_ids.dtype.element_ty))
    tl.store(is_valid + row, valid.to(tl.uint8))


def sample(
    logits: torch.Tensor,
    inputs: SampleInputs,
    token_ids: torch.Tensor,
    is_valid: torch.Tensor,
    scratch: SampleScratch,
    cuts: FilterParams | None = None,
) -> None:
    """Samples a token for each row. logits [rows, vocabulary]; token_ids any integers [rows]; is_valid uint8 [rows]: 0
    where logits are not numbers. Without `cuts` no row has any, and two launches are enough."""
    rows, size = logits.shape
    num_chunks = triton.cdiv(size, _CHUNK)
    padded = triton.next_power_of_2(num_chunks)
    stride, s = logits.stride(0), scratch
    launch(
        _survey,
        (num_chunks, rows),
        logits,
        inputs.temperatures,
        s.peaks,
        s.firsts,
        s.masses,
        s.lowest,
        stride,
        size,
        num_chunks,
        CHUNK=_CHUNK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    if cuts is not None:
        launch(
            _pick_out, (num_chunks, rows),
            logits, inputs.temperatures, cuts.top_ks, cuts.top_ps, s.peaks, s.candidates, s.counts, stride, size,
            num_chunks,
            CHUNK=_CHUNK, CHUNKS=padded, ROOM=_CANDIDATES, LEAST=_CANDIDATE, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
        launch(
            _cut, (rows,),
            logits, inputs.temperatures, cuts.top_ks, cuts.top_ps, cuts.min_ps, s.peaks, s.masses, s.candidates,
            s.counts, s.lowest, stride, size, num_chunks,
            CHUNK=4 * _CHUNK, CHUNKS=padded, ROOM=_CANDIDATES, BISECTIONS=_BISECTIONS, num_warps=16,
            enable_fp_fusion=False,
        )  # fmt: skip
        launch(
            _resurvey, (num_chunks, rows),
            logits, inputs.temperatures, s.peaks, s.masses, s.lowest, stride, size, num_chunks,
            CHUNK=_CHUNK, CHUNKS=padded, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    launch(
        _draw, (rows,),
        logits, inputs.temperatures, inputs.seeds, inputs.choices, inputs.positions, s.peaks, s.firsts, s.masses,
        s.lowest, token_ids, is_valid, stride, size, num_chunks,
        CHUNK=_CHUNK, CHUNKS=padded, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
