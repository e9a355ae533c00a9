"""Every kernel against its float64 reference: fresh random inputs, poisoned outputs. Each function returns the error."""

import random as chance
from collections.abc import Sequence

import torch

from benchmarks.gpu.paged_case import (
    DEVICE,
    Heads,
    block_tables,
    error,
    filled_pages,
    on_device,
    poisoned,
    random,
    rotary_tables,
)
from onward.kernels import torch_reference
from onward.kernels.torch_ops import TorchOps
from onward.kernels.triton.accumulate_rows import accumulate_rows
from onward.kernels.triton.activation import silu_and_mul
from onward.kernels.triton.chunk_attention import ChunkPlan, chunk_attention
from onward.kernels.triton.chunk_tiles import chunk_tiles
from onward.kernels.triton.decode_attention import DecodePlan, DecodeScratch, decode_attention
from onward.kernels.triton.invariant_linear import invariant_linear
from onward.kernels.triton.invariant_linear_plan import LinearPlan
from onward.kernels.triton.logsumexp import logsumexp
from onward.kernels.triton.rms_norm import add_rms_norm, rms_norm
from onward.kernels.triton.rotate_and_store import rotate_and_store
from onward.kernels.triton.sampling import FilterParams, SampleInputs, SampleScratch, sample
from onward.kernels.triton.single_row_linear import SingleRowPlan, single_row_linear
from onward.kernels.triton.split_softmax import FIXED_SPLITS, WHOLE
from onward.kernels.triton.token_bitmask import apply_token_bitmask

TOLERANCE = 1e-2
EPS = 1e-6
DECODE_PLANS = [
    DecodePlan(splits, parts, num_warps)
    for splits, parts in ((WHOLE, 1), (FIXED_SPLITS, 1), (FIXED_SPLITS, 8))
    for num_warps in (1, 4)
]


def decode_error(
    heads: Heads, block_size: int, lengths: Sequence[int], plan: DecodePlan, *, normed: bool, overlap: bool = False
) -> float:
    """Returns the largest error of outputs and of what is written to the pages. `lengths` count the new token, whose place
    is still poisoned; rows of length 0 are padding."""
    tables, num_blocks = block_tables(lengths, block_size)
    kv = filled_pages([max(0, n - 1) for n in lengths], tables, num_blocks, heads, block_size)
    num_finite = int(torch.isfinite(kv).sum())
    qkv, out = random(len(lengths), heads.qkv_width), poisoned(len(lengths), heads.num_heads, heads.dim)
    norms = (random(heads.dim), random(heads.dim)) if normed else None
    rotary = rotary_tables(max(lengths), heads.dim)
    scratch = _poisoned_scratch(len(lengths), heads, plan.splits.count(max(lengths)))
    q, k, v = _turned(qkv, heads, norms, rotary, (_int32(lengths) - 1).clamp(min=0))
    decode_attention(qkv, kv, tables, _int32(lengths), out, norms, EPS, rotary, plan, scratch, overlap=overlap)
    assert not scratch.tickets.any(), "tickets are put back"
    worst, rows, expected = 0.0, [row for row, length in enumerate(lengths) if length], []
    for row in rows:
        keys, values = torch_reference.history(kv, tables[row], lengths[row])
        worst = max(worst, error(keys[-1], k[row]), error(values[-1], v[row]))
        expected.append(torch_reference.attention(q[row : row + 1], keys, values, lengths[row] - 1))
    assert int(torch.isfinite(kv).sum()) <= num_finite + k[rows].numel() + v[rows].numel(), (
        "only new places are written"
    )
    assert int(torch.isfinite(out).sum()) <= out[rows].numel(), "padding is left alone"
    return max(worst, error(out[rows], torch.cat(expected)))


def _poisoned_scratch(batch: int, heads: Heads, num_splits: int) -> DecodeScratch:
    scratch = DecodeScratch.allocate(batch, heads.num_heads, heads.num_kv_heads, heads.dim, num_splits, DEVICE)
    for tensor in (scratch.partials, scratch.peaks, scratch.totals):
        tensor.fill_(float("nan"))
    return scratch


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _turned(qkv, heads: Heads, norms, rotary, positions) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    q, k, v = qkv.double().view(len(qkv), -1, heads.dim).split(sizes, dim=1)
    if norms is not None:
        q, k = torch_reference.rms_norm(q, norms[0], EPS), torch_reference.rms_norm(k, norms[1], EPS)
    cos, sin = rotary[0][positions], rotary[1][positions]
    return torch_reference.rotate(q, cos, sin), torch_reference.rotate(k, cos, sin), v


def chunk_error(heads: Heads, block_size: int, chunks: Sequence[tuple[int, int]], plan: ChunkPlan) -> float:
    """`chunks` are (tokens computed before, tokens of the chunk); requests are those of the tables, shuffled."""
    order = list(range(len(chunks)))
    chance.shuffle(order)
    lengths = [0] * len(chunks)
    for request, (start, count) in zip(order, chunks, strict=True):
        lengths[request] = start + count
    tables, num_blocks = block_tables(lengths, block_size)
    kv = filled_pages(lengths, tables, num_blocks, heads, block_size)
    rows = sum(count for _, count in chunks)
    q, out = random(rows, heads.num_heads, heads.dim), poisoned(rows, heads.num_heads, heads.dim)
    spans = [(request, start, count) for request, (start, count) in zip(order, chunks, strict=True)]
    chunk_attention(q, kv, tables, on_device(chunk_tiles(spans, heads.group, plan.rows)), out, plan)
    worst, row, largest = 0.0, 0, 0.0
    for request, start, count in spans:
        keys, values = torch_reference.history(kv, tables[request], start + count)
        expected = torch_reference.attention(q[row : row + count], keys, values, start)
        found = out[row : row + count]
        if not torch.isfinite(found).all():
            return float("inf")
        worst = max(worst, float((found.double() - expected).abs().max()))
        largest = max(largest, float(expected.abs().max()))
        row += count
    return worst / largest


def rotate_and_store_error(heads: Heads, block_size: int, rows: int, *, normed: bool) -> float:
    """Rows are tokens of one request at random places; also: nothing else in the pages is touched."""
    places = torch.randperm(4 * rows, device=DEVICE)[:rows]
    num_blocks = 4 * rows // block_size + 1
    table = torch.randperm(num_blocks, device=DEVICE).int()
    kv = poisoned(num_blocks, 2, heads.num_kv_heads, block_size, heads.dim)
    qkv = random(rows, heads.qkv_width)
    norms = (random(heads.dim), random(heads.dim)) if normed else None
    rotary = rotary_tables(4 * rows, heads.dim)
    q, k, v = _turned(qkv, heads, norms, rotary, places)
    pages = table[places // block_size]
    rotate_and_store(qkv, kv, places.int(), pages, norms, EPS, rotary)
    found_q = qkv[:, : heads.num_heads * heads.dim].reshape(q.shape)
    written = kv[pages.long(), :, :, places % block_size]  # [rows, 2, kv heads, dim]
    assert int(torch.isfinite(kv).sum()) == 2 * k.numel(), "only the rows' places are written"
    return max(error(found_q, q), error(written[:, 0], k), error(written[:, 1], v))


def norm_error(rows: int, size: int, *, adds: bool) -> float:
    x, residual, weight, out = random(rows, size), random(rows, size), random(size), poisoned(rows, size)
    if not adds:
        rms_norm(x, weight, EPS, out)
        return error(out, torch_reference.rms_norm(x, weight, EPS))
    total = x.double() + residual.double()
    add_rms_norm(x, residual, weight, EPS, out)
    return max(error(residual, total), error(out, torch_reference.rms_norm(residual, weight, EPS)))


def silu_gate_error(rows: int, size: int) -> float:
    gate_up, out = 3 * random(rows, 2 * size), poisoned(rows, size)
    silu_and_mul(gate_up, out)
    return error(out, torch_reference.silu_and_mul(gate_up))


def add_rows_differences(rows: int, size: int, chunks: Sequence[int]) -> int:
    """Numbers that are not those of adding up the rows in their order on the host, cut up in this way."""
    x = random(rows, size)
    expected = torch.zeros(size, dtype=torch.float64)
    for row in x.cpu():
        expected += row
    total, at = torch.zeros(size, dtype=torch.float64, device=DEVICE), 0
    for count in chunks:
        accumulate_rows(x[at : at + count], total)
        at += count
    return int((total.cpu() != expected).sum())


def forbid_differences(num_rows: int, vocab_size: int, rows: Sequence[int]) -> int:
    """Logits that are not what plain torch makes of them."""
    logits = random(num_rows, vocab_size).float()
    bits = torch.randint(0, 256, (len(rows), -(-vocab_size // 8)), dtype=torch.uint8, device=DEVICE)
    expected, numbers = logits.clone(), torch.tensor(rows, device=DEVICE)
    TorchOps().apply_token_bitmask(expected, numbers, bits)
    apply_token_bitmask(logits, numbers, bits)
    return int((logits != expected).sum())


def one_row_error(
    num_inputs: int, num_outputs: int, *, normed: bool, adds: bool, gates: bool, scaled: bool = False
) -> float:
    x, weight = random(1, num_inputs), random(num_outputs * (2 if gates else 1), num_inputs)
    scales = None
    if scaled:
        scales = torch.rand(len(weight), device=DEVICE) + 0.5
        weight = weight.to(torch.float8_e4m3fn)
    out = random(1, num_outputs) if adds else poisoned(1, num_outputs)
    norm = (random(num_inputs), EPS) if normed else None
    expected = (torch_reference.rms_norm(x, *norm) if norm else x.double()) @ weight.double().T
    if scales is not None:
        expected = expected * scales.double()
    if gates:
        expected = torch_reference.silu_and_mul(expected)
    if adds:
        expected = expected + out.double()
    single_row_linear(
        x, weight, out, SingleRowPlan.choose(len(weight), num_inputs), norm=norm, scales=scales, adds=adds, gates=gates
    )
    return error(out, expected)


def linear_error(
    rows: int, num_inputs: int, num_outputs: int, plan: LinearPlan, *, gates: bool, overlap: bool = False
) -> float:
    x, weight = random(rows, num_inputs), random(num_outputs * (2 if gates else 1), num_inputs)
    out = poisoned(rows, num_outputs)
    invariant_linear(x, weight, out, plan, gates=gates, overlap=overlap)
    expected = x.double() @ weight.double().T
    return error(out, torch_reference.silu_and_mul(expected) if gates else expected)


def linear_differences(num_inputs: int, num_outputs: int, plans: Sequence[LinearPlan], *, gates: bool) -> int:
    """How many outputs are not the same bits alone, in batches, and cut up in these ways."""
    x, weight = random(300, num_inputs), random(num_outputs * (2 if gates else 1), num_inputs)
    whole = poisoned(300, num_outputs)
    invariant_linear(x, weight, whole, plans[0], gates=gates)
    different = 0
    for plan in plans:
        for first, count in ((0, 1), (5, 17), (100, 64), (171, 128), (0, 300)):
            part = poisoned(count, num_outputs)
            invariant_linear(x[first : first + count], weight, part, plan, gates=gates)
            different += int((part != whole[first : first + count]).sum())
    return different


def log_totals_error(rows: int, size: int) -> float:
    """A quarter of the tokens is forbidden."""
    logits = 5 * random(rows, size, dtype=torch.float32)
    logits[torch.rand(rows, size, device=DEVICE) < 0.25] = -torch.inf
    return error(logsumexp(logits), logits.double().logsumexp(-1))


def sampling_mistakes(rows: int, size: int, *, cut: bool, dtype: torch.dtype = torch.float32) -> int:
    """How many rows drew a token in whose share their number does not lie (give or take 1e-4 of the whole)."""
    logits = (2 * torch.randn(rows, size, device=DEVICE)).to(dtype)
    temperatures = [chance.choice([0.0, 0.3, 0.6, 1.0, 1.7]) for _ in range(rows)]
    top_ks = [chance.choice([0, 1, 5, 50, size]) if cut else 0 for _ in range(rows)]
    top_ps = [chance.choice([1.0, 0.95, 0.5]) if cut else 1.0 for _ in range(rows)]
    min_ps = [chance.choice([0.0, 0.05]) if cut else 0.0 for _ in range(rows)]
    seeds = [chance.randrange(-(2**63), 2**63) for _ in range(rows)]
    positions = [chance.randrange(2**20) for _ in range(rows)]
    tokens, valid = draw(logits, temperatures, seeds, positions, (top_ks, top_ps, min_ps) if cut else None)
    mistakes = 0
    for row in range(rows):
        if not valid[row]:
            mistakes += 1
        elif temperatures[row] == 0.0:
            mistakes += tokens[row] != int(logits[row].float().argmax())
        else:
            weights = torch_reference.filtered_weights(
                logits[row], temperatures[row], top_ks[row], top_ps[row], min_ps[row]
            )
            number = torch_reference.uniform(seeds[row] % 2**64, row % 3, positions[row])
            mistakes += not _lies_in(weights, tokens[row], number)
    return mistakes


def _lies_in(weights: torch.Tensor, token: int, number: float) -> bool:
    ends = weights.cumsum(0) / weights.sum()
    share = float(weights[token] / weights.sum())
    end = float(ends[token])
    return end - share - 1e-4 <= number <= end + 1e-4 and share > 0


def draw(
    logits: torch.Tensor,
    temperatures: Sequence[float],
    seeds: Sequence[int],
    positions: Sequence[int],
    cuts: tuple[Sequence[int], Sequence[float], Sequence[float]] | None = None,
) -> tuple[list[int], list[int]]:
    """Tokens and whether they are valid; the choices are 0, 1, 2, 0, …"""
    rows, size = logits.shape

    def floats(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=DEVICE)

    def longs(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=DEVICE)

    inputs = SampleInputs(floats(temperatures), longs(seeds), longs([r % 3 for r in range(rows)]), longs(positions))
    token_ids, is_valid = longs([-1] * rows), torch.full((rows,), 9, dtype=torch.uint8, device=DEVICE)
    device_cuts = FilterParams(_int32(cuts[0]), floats(cuts[1]), floats(cuts[2])) if cuts is not None else None
    sample(logits, inputs, token_ids, is_valid, SampleScratch.allocate(rows, size, DEVICE), device_cuts)
    return token_ids.tolist(), is_valid.tolist()
