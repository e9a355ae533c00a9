"""On a CUDA device a row's bits depend on that row alone: not on its batch, the plan, or where its tokens are cut.

Each test computes the same rows in every way that serves them and compares all elements. The ways are put into groups of
equal results; there must be one. `test_compiled_order.py` reads the reasons from the compiled code, without a device.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pytest
import torch

from onward.bench.model_shapes import SHAPES
from onward.kernels import torch_reference
from onward.kernels.batch_sizes import padded_batch_size
from onward.kernels.ops import Scoring
from onward.kernels.triton.chunk_attention import ChunkPlan, chunk_attention
from onward.kernels.triton.chunk_tiles import chunk_tiles
from onward.kernels.triton.decode_attention import DecodePlan, DecodeScratch, decode_attention
from onward.kernels.triton.invariant_linear_plan import LinearPlan, library_rows
from onward.kernels.triton.logsumexp import logsumexp
from onward.kernels.triton.rms_norm import add_rms_norm, rms_norm
from onward.kernels.triton.rotate_and_store import rotate_and_store
from onward.kernels.triton.sampling import FilterParams, SampleInputs, SampleScratch, sample
from onward.kernels.triton.triton_ops import TritonOps
from onward.models.loader.config_parser import from_hf

pytestmark = pytest.mark.gpu
DEVICE, EPS = "cuda", 1e-6
LEAST_ELEMENTS = 10**7

LENGTH = 2700
"""Fine and coarse splits, and a last tile that is not full."""
CUTS = {
    "whole": (0,),
    "odd chunks": (0, 7, 300, 301, 999, 2049, 2563),
    "token by token": tuple(range(LENGTH)),
}

NUM_ROWS, ROWS_BEHIND = 2048, 512
ROW_COUNTS = (1, 2, 16, 17, 31, 32, 33, 64, 65, 128, 129, 256, 257, 511, 512, 513, 1000, 2048)
MATRICES = ("qkv", "o", "gate_up", "down", "head")

VOCAB_SIZE = 151_936
SAMPLED_ROWS, POSITIONS = 256, 800


def assert_equal_results(results: Iterable[tuple[str, torch.Tensor]], least: int = LEAST_ELEMENTS) -> None:
    """All results have the same elements, and there are enough of them. A result may be overwritten after its turn."""
    groups: list[tuple[torch.Tensor, list[str]]] = []
    num_compared = 0
    for name, result in results:
        num_compared += result.numel()
        names = next((names for first, names in groups if torch.equal(first, result)), None)
        if names is None:
            groups.append((result.clone(), [name]))
        else:
            names.append(name)
    assert len(groups) == 1, _told(groups)
    assert not groups[0][0].isnan().any()
    assert num_compared >= least


def _told(groups: list[tuple[torch.Tensor, list[str]]]) -> str:
    first = groups[0][0]
    lines = [f"{int((first != one).sum())} of {one.numel()} differ: {', '.join(names)}" for one, names in groups[1:]]
    return "\n".join([f"{len(groups)} groups; compared with {', '.join(groups[0][1])}:", *lines])


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype)


def _poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=DEVICE)


def _pieces(count: int) -> Iterator[slice]:
    for start in range(0, NUM_ROWS, count):
        yield slice(start, min(NUM_ROWS, start + count))


@dataclass(frozen=True, slots=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    dim: int
    block_size: int
    normed: bool = True

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def __str__(self) -> str:
        return f"{self.dim}-{self.group}-{self.block_size}"


HEADS = [
    Heads(16, 8, 128, 16),
    Heads(32, 8, 128, 64),
    Heads(8, 8, 128, 16),
    Heads(10, 2, 128, 64),
    Heads(32, 1, 128, 16),
    Heads(9, 3, 64, 16, normed=False),
    Heads(14, 2, 64, 64),
    Heads(12, 2, 96, 16),
    Heads(4, 2, 256, 16),
    Heads(8, 1, 256, 64),
]


def _decode_plans(head_dim: int) -> list[DecodePlan]:
    """Returns of each kind in use the plan with the most programs for a row, and the one with the fewest."""
    batches = sorted({padded_batch_size(count) for count in range(1, 513)})
    kinds: dict[tuple[bool, int], list[DecodePlan]] = {}
    for batch, num_kv_heads in itertools.product(batches, (1, 2, 4, 8)):
        plan = DecodePlan.choose(batch, num_kv_heads, head_dim, 4096, fixed_order=True)
        kinds.setdefault((plan.parts > 1, plan.num_warps), []).append(plan)

    def parts(plan: DecodePlan) -> int:
        return plan.parts

    return list({plan: None for plans in kinds.values() for plan in (min(plans, key=parts), max(plans, key=parts))})


class Attending:
    """One request of LENGTH tokens. Its keys are `key_scale` times as large as those of a usual model."""

    def __init__(self, heads: Heads, key_scale: float, scoring: Scoring | None = None) -> None:
        self._heads, self._scoring = heads, scoring
        self._qkv = 2 * _random(LENGTH, (heads.num_heads + 2 * heads.num_kv_heads) * heads.dim)
        weights = _random(heads.dim, seed=1), key_scale * _random(heads.dim, seed=2)
        self._norms = weights if heads.normed else None
        if not heads.normed:
            first = heads.num_heads * heads.dim
            self._qkv[:, first : first + heads.num_kv_heads * heads.dim] *= key_scale
        angles = torch.arange(LENGTH, device=DEVICE)[:, None] * 1e6 ** -torch.linspace(
            0, 1, heads.dim // 2, device=DEVICE
        )
        self._rotary = angles.cos(), angles.sin()
        num_blocks = -(-LENGTH // heads.block_size)
        self._empty = _poisoned(num_blocks, 2, heads.num_kv_heads, heads.block_size, heads.dim)
        generator = torch.Generator(DEVICE).manual_seed(3)
        self._table = torch.randperm(num_blocks, generator=generator, device=DEVICE, dtype=torch.int32)
        self._positions = torch.arange(LENGTH, device=DEVICE, dtype=torch.int32)
        self._pages = self._table[(self._positions // heads.block_size).long()]

    def rotated(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(queries, pages), with `count` rows in a launch."""
        qkv, kv = self._qkv.clone(), self._empty.clone()
        for start in range(0, LENGTH, count):
            rows = slice(start, start + count)
            positions, pages = self._positions[rows].clone(), self._pages[rows].clone()
            rotate_and_store(qkv[rows], kv, positions, pages, self._norms, EPS, self._rotary)
        heads = self._heads
        return qkv[:, : heads.num_heads * heads.dim].unflatten(1, (heads.num_heads, heads.dim)), kv

    def of_chunks(self, queries: torch.Tensor, kv: torch.Tensor, cuts: tuple[int, ...]) -> torch.Tensor:
        plan, out = ChunkPlan.choose(self._heads.dim, fixed_order=True), _poisoned(*queries.shape)
        chunks = [(0, start, end - start) for start, end in itertools.pairwise((*cuts, LENGTH))]
        tiles = torch.from_numpy(chunk_tiles(chunks, self._heads.group, plan.rows)).to(DEVICE)
        chunk_attention(queries, kv, self._table[None], tiles, out, plan, self._scoring)
        return out

    def decoded(self, kv: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
        """Every position as a row of one batch. The row's key and value are written to `kv`."""
        heads = self._heads
        out = _poisoned(LENGTH, heads.num_heads, heads.dim)
        scratch = DecodeScratch.allocate(
            LENGTH, heads.num_heads, heads.num_kv_heads, heads.dim, plan.splits.count(LENGTH), DEVICE
        )
        tables = self._table[None].repeat(LENGTH, 1)
        decode_attention(
            self._qkv, kv, tables, self._positions + 1, out, self._norms, EPS, self._rotary, plan, scratch,
            scoring=self._scoring, overlap=True,
        )  # fmt: skip
        assert not scratch.tickets.any(), "tickets are put back"
        return out

    def expected(self, queries: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """In float64."""
        keys, values = torch_reference.history(kv, self._table, LENGTH)
        return torch_reference.attention(queries, keys, values, 0, self._scoring)

    def stored(self, plan: DecodePlan) -> torch.Tensor:
        """What decode writes into empty pages."""
        kv = self._empty.clone()
        self.decoded(kv, plan)
        return kv


@pytest.mark.parametrize("key_scale", [0.5, 6.0])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_is_the_same_in_every_plan_of_decode_and_in_chunks_cut_anywhere(
    heads: Heads, key_scale: float
) -> None:
    case = Attending(heads, key_scale)
    queries, kv = case.rotated(LENGTH)

    def results() -> Iterator[tuple[str, torch.Tensor]]:
        for name, cuts in CUTS.items():
            yield name, case.of_chunks(queries, kv, cuts)
        for plan in _decode_plans(heads.dim):
            yield str(plan), case.decoded(kv.clone(), plan)

    assert_equal_results(results())


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode_stores_the_keys_and_values_that_chunks_store(heads: Heads) -> None:
    case = Attending(heads, 1.0)
    expected, _ = case.rotated(LENGTH)

    def results() -> Iterator[tuple[str, torch.Tensor]]:
        for count in (LENGTH, 1, 3, 77):
            queries, kv = case.rotated(count)
            assert torch.equal(queries, expected), f"queries of {count} rows at once"
            yield f"{count} rows at once", _bits(kv)
        for plan in _decode_plans(heads.dim):
            yield str(plan), _bits(case.stored(plan))

    assert_equal_results(results(), least=LEAST_ELEMENTS // 2)


def _bits(kv: torch.Tensor) -> torch.Tensor:
    """As integers: places that are not written hold no numbers, which are not equal to themselves."""
    return kv.view(torch.int16)


def _matrix_shape(shape: str, matrix: str) -> tuple[int, int]:
    """(outputs, inputs)."""
    config = from_hf(SHAPES[shape])
    attended = config.num_heads * config.head_dim
    return {
        "qkv": (attended + 2 * config.num_kv_heads * config.head_dim, config.hidden_size),
        "o": (config.hidden_size, attended),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
        "head": (config.vocab_size, config.hidden_size),
    }[matrix]


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_products_rows_are_the_same_in_batches_of_any_size(shape: str, matrix: str) -> None:
    num_outputs, num_inputs = _matrix_shape(shape, matrix)
    ops = TritonOps(max_model_len=4096, fixed_order=True)
    weight = (_random(num_outputs, num_inputs) * num_inputs**-0.5).contiguous()
    rows = _random(NUM_ROWS, num_inputs, seed=1)
    # Steps use the first rows of buffers that have room for the largest step.
    x, out = _random(NUM_ROWS + ROWS_BEHIND, num_inputs, seed=2), _poisoned(NUM_ROWS + ROWS_BEHIND, num_outputs)
    act = _poisoned(NUM_ROWS + ROWS_BEHIND, num_outputs // 2)
    gates = matrix == "gate_up"

    def product(count: int) -> torch.Tensor:
        if gates:
            ops.invariant_gated_linear(x[:count], weight, out[:count], act[:count])
            return act[:count]
        ops.invariant_linear(x[:count], weight, out[:count])
        return out[:count]

    def results() -> Iterator[tuple[str, torch.Tensor]]:
        found = _poisoned(NUM_ROWS, num_outputs // 2 if gates else num_outputs)
        for count in ROW_COUNTS:
            found.fill_(float("nan"))
            for piece in _pieces(count):
                num_rows = piece.stop - piece.start
                x[:num_rows] = rows[piece]
                found[piece] = product(num_rows)
            yield f"{count} rows ({_way(count, num_outputs, num_inputs, gates=gates)})", found

    assert_equal_results(results())


def _way(num_rows: int, num_outputs: int, num_inputs: int, *, gates: bool) -> str:
    called_with = library_rows(num_rows, num_outputs, num_inputs)
    if called_with is not None:
        return f"the library's with {called_with} rows, or ours"
    plan = LinearPlan.choose(num_rows, num_outputs // 2 if gates else num_outputs, gates=gates)
    return f"tiles {plan.rows} x {plan.outputs} x {plan.inputs}"


@pytest.mark.parametrize("size", [1024, 4096])
def test_norms_are_the_same_for_any_number_of_rows(size: int) -> None:
    x, stream, weight = _random(NUM_ROWS, size), _random(NUM_ROWS, size, seed=1), _random(size, seed=2)

    def results() -> Iterator[tuple[str, torch.Tensor]]:
        for count in (NUM_ROWS, 1, 3, 64):
            plain, added, residual = _poisoned(NUM_ROWS, size), _poisoned(NUM_ROWS, size), stream.clone()
            for piece in _pieces(count):
                rms_norm(x[piece], weight, EPS, plain[piece])
                add_rms_norm(x[piece], residual[piece], weight, EPS, added[piece], overlap=True)
            yield f"{count} rows", torch.stack([plain, added, residual])

    assert_equal_results(results())


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 50_257])
def test_the_normaliser_of_a_row_is_the_same_alone_and_among_others(vocab_size: int) -> None:
    logits = 4 * _random(192, vocab_size, dtype=torch.float32)

    def results() -> Iterator[tuple[str, torch.Tensor]]:
        for count in (192, 1, 3, 64):
            yield f"among {count} rows", torch.cat([logsumexp(part.clone()) for part in logits.split(count)])

    assert_equal_results(results(), least=4 * 192)


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows that sample, without and with cuts. Every second one may have some."""

    logits: torch.Tensor
    """bfloat16: another type holds the same numbers."""
    temperatures: torch.Tensor
    seeds: torch.Tensor
    cuts: FilterParams

    def tokens(
        self, position: int, rows: slice = slice(None), *, with_cuts: bool, dtype: torch.dtype = torch.bfloat16
    ) -> torch.Tensor:
        logits, temperatures, seeds = (
            self.logits[rows].to(dtype),
            self.temperatures[rows].clone(),
            self.seeds[rows].clone(),
        )
        count = len(logits)
        inputs = SampleInputs(temperatures, seeds, torch.zeros_like(seeds), torch.full_like(seeds, position))
        token_ids, is_valid = (torch.full((count,), -1, dtype=torch.int32, device=DEVICE) for _ in range(2))
        scratch = SampleScratch.allocate(count, logits.shape[1], DEVICE)
        columns = self.cuts.top_ks, self.cuts.top_ps, self.cuts.min_ps
        cuts = FilterParams(*(column[rows].clone() for column in columns)) if with_cuts else None
        sample(logits, inputs, token_ids, is_valid, scratch, cuts)
        assert is_valid.all()
        return token_ids


def _no_cuts(count: int) -> FilterParams:
    return FilterParams(
        torch.zeros(count, dtype=torch.int32, device=DEVICE), torch.ones(count, device=DEVICE),
        torch.zeros(count, device=DEVICE),
    )  # fmt: skip


def _cuts_of_odd_rows(count: int) -> FilterParams:
    """top-k, top-p, min-p, and all of them, in turn; rows between them have none."""
    cuts = _no_cuts(count)
    cuts.top_ks[1::8], cuts.top_ps[3::8], cuts.min_ps[5::8] = 40, 0.9, 0.02
    cuts.top_ks[7::8], cuts.top_ps[7::8], cuts.min_ps[7::8] = 100, 0.8, 0.01
    return cuts


def _draws() -> Draws:
    """Half of the rows are so flat that a token's share is 7e-6: some draws fall so close to a border that
    a sum of float32 in another order would move it."""
    logits = _random(SAMPLED_ROWS, VOCAB_SIZE, dtype=torch.float32)
    logits[: SAMPLED_ROWS // 2] *= 0.05
    logits[SAMPLED_ROWS // 2 :] *= 3
    temperatures = 0.5 + torch.rand(SAMPLED_ROWS, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    seeds = torch.arange(SAMPLED_ROWS, dtype=torch.int64, device=DEVICE) * 7919 - 2**62
    return Draws(logits.to(torch.bfloat16), temperatures, seeds, _cuts_of_odd_rows(SAMPLED_ROWS))


def test_a_row_without_cuts_samples_the_same_token_whatever_the_others_have() -> None:
    draws = _draws()
    ways: dict[str, Callable[[int], torch.Tensor]] = {
        "no cuts": lambda position: draws.tokens(position, with_cuts=False)[::2],
        "others have cuts": lambda position: draws.tokens(position, with_cuts=True)[::2],
        "no cuts, float32": lambda position: draws.tokens(position, with_cuts=False, dtype=torch.float32)[::2],
        "others have cuts, float32": lambda position: draws.tokens(position, with_cuts=True, dtype=torch.float32)[::2],
    }
    assert_equal_results(
        ((name, torch.stack([way(position) for position in range(POSITIONS)])) for name, way in ways.items()),
        least=4 * 10**5,
    )


def test_a_row_with_cuts_samples_the_same_token_in_any_batch_and_from_float32() -> None:
    draws = _draws()

    def tokens(dtype: torch.dtype, count: int) -> torch.Tensor:
        parts = [slice(start, start + count) for start in range(0, SAMPLED_ROWS, count)]
        return torch.stack(
            [
                torch.cat([draws.tokens(position, part, with_cuts=True, dtype=dtype) for part in parts])
                for position in range(0, POSITIONS, 16)
            ]
        )

    ways = itertools.product((torch.bfloat16, torch.float32), (SAMPLED_ROWS, 96, 7))
    assert_equal_results(((f"{dtype}, {count} rows", tokens(dtype, count)) for dtype, count in ways), least=7 * 10**4)


def test_a_row_alone_samples_the_token_that_it_samples_in_a_batch() -> None:
    draws = _draws()
    for position in range(4):
        in_batch = draws.tokens(position, with_cuts=True)
        alone = [draws.tokens(position, slice(row, row + 1), with_cuts=True) for row in range(SAMPLED_ROWS)]
        assert torch.equal(torch.cat(alone), in_batch)
        alone = [draws.tokens(position, slice(row, row + 1), with_cuts=False) for row in range(0, SAMPLED_ROWS, 2)]
        assert torch.equal(torch.cat(alone), in_batch[::2])


def test_a_number_on_the_border_of_two_tokens_falls_on_one_side_in_every_batch() -> None:
    """Temperatures are such that the tokens before the middle of the vocabulary have the mass that the number asks for, as
    exactly as float32 can tell."""
    position = 5
    seeds = [seed for seed in range(4 * SAMPLED_ROWS) if 0.6 < torch_reference.uniform(seed, 0, position) < 0.95]
    seeds = seeds[:SAMPLED_ROWS]
    wanted = torch.tensor(
        [torch_reference.uniform(seed, 0, position) for seed in seeds], device=DEVICE, dtype=torch.float64
    )
    row = _random(VOCAB_SIZE, dtype=torch.float32)
    row[: VOCAB_SIZE // 2] += 1
    row = row.to(torch.bfloat16)
    temperatures = _temperatures_for(row, wanted)
    count = len(seeds)
    draws = Draws(
        row.repeat(count, 1), temperatures, torch.tensor(seeds, device=DEVICE), _cuts_of_odd_rows(count)
    )  # fmt: skip
    near = draws.tokens(position, with_cuts=False) - VOCAB_SIZE // 2
    assert int((near.abs() <= 2).sum()) > 0.9 * count, "numbers fall beside the border"
    alone = [draws.tokens(position, slice(one, one + 1), with_cuts=False) for one in range(0, count, 2)]
    results = {
        "alone": torch.cat(alone),
        "no cuts": draws.tokens(position, with_cuts=False)[::2],
        "others have cuts": draws.tokens(position, with_cuts=True)[::2],
        "float32": draws.tokens(position, with_cuts=False, dtype=torch.float32)[::2],
        "others have cuts, float32": draws.tokens(position, with_cuts=True, dtype=torch.float32)[::2],
    }
    assert_equal_results(results.items(), least=1)


def _temperatures_for(row: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """With which the first half of the tokens has the wanted share of the mass. It falls as the temperature rises."""
    low, high = torch.full_like(wanted, 0.05), torch.full_like(wanted, 50.0)
    logits = row.double() - row.double().max()
    for _ in range(60):
        middle = (low + high) / 2
        ends = (logits / middle[:, None]).exp()
        share = ends[:, : len(row) // 2].sum(1) / ends.sum(1)
        low, high = torch.where(share > wanted, middle, low), torch.where(share > wanted, high, middle)
    return high.float()
