"""Runs Triton kernels in Triton's interpreter, which computes with numpy, and compares them with float64.

    TRITON_INTERPRET=1 python -m tests.kernels.interpreted_kernels [RULE]    prints one JSON object

Triton reads the variable when kernels are defined, so this is a process of its own. With RULE, a rule of `BROKEN` is broken
before anything runs.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterator

import numpy
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle as Handle

from onward.kernels import torch_reference
from onward.kernels.ops import Activation, AttentionLayer, Norms, NormWeights, Rotary, Scoring
from onward.kernels.torch_ops import TorchOps
from onward.kernels.triton import activation, decode_attention, elementwise, rotate_and_store, row_norm
from onward.kernels.triton import chunk_attention as chunks
from onward.kernels.triton.chunk_tiles import chunk_tiles
from onward.kernels.triton.decode_attention import DecodePlan, DecodeScratch
from onward.kernels.triton.split_softmax import Splits

LENGTH, NUM_HEADS, NUM_KV_HEADS, DIM, PAGE, EPS = 80, 4, 2, 32, 16, 1e-5
SPLITS = Splits(fine=16, num_fine=2, coarse=32, tile=16)
CUTS = {"whole": (0,), "odd chunks": (0, 5, 60)}
"""A tile of the last chunk has rows whose windows begin in different splits."""
DECODED = (0, 16, 33, 71)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _rotary(rotated: int) -> Rotary:
    angles = torch.arange(LENGTH)[:, None] * 1e4 ** -torch.linspace(0, 1, rotated // 2)
    return angles.cos(), angles.sin()


def _norms(size: int) -> Norms:
    return 1 + 0.3 * _random(size, seed=5), 1 + 0.3 * _random(size, seed=6)


_SINKS = _random(NUM_HEADS, seed=4)
ATTENTION: dict[str, AttentionLayer] = {
    "window of 8": AttentionLayer(Scoring(DIM**-0.5, window=8), _rotary(DIM), None, EPS),
    "soft-cap, sinks, no rope": AttentionLayer(Scoring(0.5, softcap=2.0, sinks=_SINKS), None, None, EPS),
    "all, padded heads": AttentionLayer(Scoring(0.4, 33, 3.0, _SINKS), _rotary(16), _norms(20), EPS),
}


class Attending:
    """One request, whose pages are full of what is not a number until something is written there."""

    def __init__(self, layer: AttentionLayer) -> None:
        self._layer = layer
        num_blocks = -(-LENGTH // PAGE)
        self._kv = torch.full((num_blocks + 1, 2, NUM_KV_HEADS, PAGE, DIM), torch.nan)
        self._table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)).int()[None]
        heads = 2 * _random(LENGTH, NUM_HEADS + 2 * NUM_KV_HEADS, DIM)
        if layer.norms is not None:
            heads[..., len(layer.norms[0]) :] = 0  # padding
        self._qkv = heads.flatten(1)
        self._positions = torch.arange(LENGTH, dtype=torch.int32)
        self._pages = self._table[0][(self._positions // PAGE).long()]

    def expected(self) -> torch.Tensor:
        qkv, kv, out = self._qkv.double(), self._kv.double(), torch.zeros(LENGTH, NUM_HEADS * DIM).double()
        ops = TorchOps()
        ops.rotate_and_store(qkv, kv, self._positions, self._pages, self._layer)
        tiles = torch.from_numpy(chunk_tiles([(0, 0, LENGTH)], 1, LENGTH))
        ops.chunk_attention(qkv, kv, self._table, tiles, NUM_HEADS, self._layer.scoring, out)
        return out.unflatten(1, (NUM_HEADS, DIM))

    def in_chunks(self, starts: tuple[int, ...]) -> torch.Tensor:
        out = torch.full((LENGTH, NUM_HEADS, DIM), torch.nan)
        for start, end in zip(starts, (*starts[1:], LENGTH), strict=True):
            qkv = self._qkv[start:end].clone()
            where = self._positions[start:end], self._pages[start:end]
            rotate_and_store.rotate_and_store(
                qkv, self._kv, *where, self._layer.norms, self._layer.eps, self._layer.rotary
            )
            queries, table = qkv[:, : NUM_HEADS * DIM].unflatten(1, (NUM_HEADS, DIM)), self._table_from(start)
            tiles = torch.from_numpy(chunk_tiles([(0, start, end - start)], NUM_HEADS // NUM_KV_HEADS, 64))
            plan = chunks.ChunkPlan(SPLITS, rows=64)
            chunks.chunk_attention(
                queries, self._kv, table, tiles, out[start:end], plan, self._layer.scoring
            )  # fmt: skip
        return out

    def decoded(self, parts: int) -> torch.Tensor:
        """Some positions, one by one."""
        out = torch.full((LENGTH, NUM_HEADS, DIM), torch.nan)
        scratch = DecodeScratch.allocate(1, NUM_HEADS, NUM_KV_HEADS, DIM, SPLITS.count(LENGTH), "cpu")
        for position in DECODED:
            table = self._table_from(position)
            decode_attention.decode_attention(
                self._qkv[position : position + 1], self._kv, table, torch.tensor([position + 1], dtype=torch.int32),
                out[position : position + 1], self._layer.norms, self._layer.eps, self._layer.rotary,
                DecodePlan(SPLITS, parts), scratch, scoring=self._layer.scoring,
            )  # fmt: skip
        return out

    def _table_from(self, position: int) -> torch.Tensor:
        """Blocks before the window of the row at `position` are not the request's any more."""
        table, window = self._table.clone(), self._layer.scoring.window or LENGTH
        table[:, : max(0, position - window + 1) // PAGE] = len(self._kv) - 1
        return table


def _attention_results() -> Iterator[tuple[str, float, int]]:
    """Name, largest error relative to the largest value, and elements that differ between the ways."""
    rows = torch.tensor(DECODED)
    for name, layer in ATTENTION.items():
        attending = Attending(layer)
        expected = attending.expected()
        whole, *others = [attending.in_chunks(starts) for starts in CUTS.values()]
        differing = sum(int((other != whole).sum()) for other in others)
        for parts in (1, 3) if layer.scoring.sinks is not None else (1,):
            differing += int((attending.decoded(parts)[rows] != whole[rows]).sum())
        yield name, _error(whole, expected), differing


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    error = float((found.double() - expected).abs().max() / expected.abs().max())
    return error if error == error else 1e9  # not a number


def _row_results() -> Iterator[tuple[str, float, int]]:
    x, weight, bias = 2 * _random(5, 48) + 1, _random(48, seed=1), _random(48, seed=2)
    norms = {
        "rms norm": NormWeights(weight),
        "layer norm": NormWeights(weight, bias, centers=True),
        "layer norm without bias": NormWeights(weight, centers=True),
        "norm of padded rows": NormWeights(weight, count=40),
    }
    ops = TorchOps()
    for name, norm in norms.items():
        found = x.clone()
        row_norm.row_norm(found, norm, EPS, found)
        yield name, _error(found, torch_reference.norm(x, norm, EPS)), 0
    kinds: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu")
    for kind in kinds:
        for size in (48, 24):
            found, expected = torch.zeros(5, size), torch.zeros(5, size).double()
            activation.activate(2 * x, kind, found)
            ops.activate(2 * x, kind, expected)
            yield f"{kind}{' with a gate' if size == 24 else ''}", _error(found, expected), 0
    found, expected = x.clone(), x.double()
    elementwise.add_scaled(x, 0.3, found)
    ops.add_scaled(x, 0.3, expected)
    yield "scaled sum", _error(found, expected), 0
    for softcap in (None, 3.0):
        found, expected = 5 * x, 5 * x.double()
        elementwise.finish_logits(found, 0.7, softcap)
        ops.finish_logits(expected, 0.7, softcap)
        yield f"logits, capped at {softcap}", _error(found, expected), 0


def _repair_interpreter() -> None:
    """Triton's `__index__` of a scalar uses a conversion that newer versions of numpy refuse. And it puts its functions in
    place anew for every call of a function, which takes most of the time; here they stay."""
    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    patched: set[str] = set()

    def patch_tensor_too(tensor: object, scope: interpreter._LangPatchScope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def patch_once(function: Callable[..., object]) -> interpreter._LangPatchScope:
        if function.__module__ not in patched:
            patch_language(function)
            patched.add(function.__module__)
        return interpreter._LangPatchScope()

    interpreter._patch_lang_tensor, interpreter._patch_lang = patch_tensor_too, patch_once


def _fix_the_order_of_sums() -> None:
    """The interpreter multiplies with BLAS. On some CPUs (Zen, Haswell) BLAS adds a row's products in an order that depends
    on the number of rows. `tl.dot` on a GPU does not, so here each row adds its products from the first to the last."""

    def create_dot(_builder: object, a: Handle, b: Handle, d: Handle, _precision: object, _imprecise: object) -> Handle:
        total = numpy.zeros_like(d.data)
        for k in range(a.data.shape[-1]):
            total += a.data[..., k, None].astype(total.dtype) * b.data[..., k, None, :]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _without(flag: str, value: object) -> Callable[[], None]:
    """Both attention kernels are launched with another value of a flag."""

    def apply() -> None:
        for module in (decode_attention, chunks):
            original = module.scoring_flags
            module.scoring_flags = lambda scoring, original=original: original(scoring) | {flag: value}

    return apply


def _decoding_windows_too_long() -> None:
    original = decode_attention.scoring_flags

    def flags(scoring: Scoring) -> dict[str, float]:
        found = original(scoring)
        return found | {"WINDOW": found["WINDOW"] + (found["WINDOW"] > 0)}

    decode_attention.scoring_flags = flags


BROKEN: dict[str, Callable[[], None]] = {
    "no soft-cap": _without("CAP", 0.0),
    "no sinks": _without("SINKS", False),
    "no window": _without("WINDOW", 0),
    "decoding rows see one position more than chunks": _decoding_windows_too_long,
}


def main() -> None:
    assert triton_interprets(), "TRITON_INTERPRET=1 was not set when Triton was imported"
    warnings.simplefilter("ignore")  # numpy's, of rows that are padding: they divide zero by zero
    _repair_interpreter()
    _fix_the_order_of_sums()
    if len(sys.argv) > 1:
        BROKEN[sys.argv[1]]()
    results = _attention_results() if len(sys.argv) > 1 else (*_attention_results(), *_row_results())
    print(json.dumps({name: [error, differing] for name, error, differing in results}))


def triton_interprets() -> bool:
    return isinstance(row_norm._row_norm, interpreter.InterpretedFunction)


if __name__ == "__main__":
    main()
