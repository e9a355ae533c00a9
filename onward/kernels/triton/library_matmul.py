"""The matrix library's products, for sizes at which they have the bits of our own.

`invariant_linear` defines a product's bits: inputs are added up in their order. The library's kernels do the same, and
are faster for many rows, unless they cut the inputs into parts for several programs ("split-K"), as they do for some
sizes. The library chooses the kernel for a size, and the choice may change with its version. So each size is tried
before it is used. If one of 16 million elements differs from `invariant_linear`, another way is tried. If no way is
left, `invariant_linear` is used.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from onward import log

logger = logging.getLogger(__name__)

_CHECKED_ELEMENTS = 1 << 24
"""Elements to compare. A kernel that cuts the inputs of only a tenth of its tiles still differs in hundreds of
these."""
_ROWS_AT_ONCE = 1024
"""Rows that are compared at once: large batches have little memory to spare."""
_LT_MAX_ROWS, _LT_MIN_INPUTS = 112, 8192

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""x [rows, inputs], weight [outputs, inputs], out [rows, outputs]."""


def default_matmul(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(x, weight.T, out=out)


def matmul_without_split_k(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Multiplies like `default_matmul`, but never cuts the inputs. It is slower at sizes at which `default_matmul` does
    not cut them either."""
    with _without_split_k():
        torch.mm(x, weight.T, out=out)


def fastest_matmul(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Multiplies by the faster of cuBLAS and cuBLASLt, without regard to bits. Measured on an H200 with the matrices of
    Qwen3-0.6B and 8B: cuBLASLt cuts the long inputs of a large down projection better when there are few rows, and is
    slower elsewhere."""
    outputs, inputs = weight.shape
    if len(x) <= _LT_MAX_ROWS and inputs >= _LT_MIN_INPUTS and outputs < inputs:
        with _use_library("cublaslt"):
            torch.mm(x, weight.T, out=out)
    else:
        torch.mm(x, weight.T, out=out)


class LibraryMatmuls:
    """Finds for each size the first of the library's ways that has the bits of the reference."""

    def __init__(self, reference: Product, ways: Sequence[Product] = (default_matmul, matmul_without_split_k)) -> None:
        self._reference, self._ways = reference, ways
        self._found: dict[tuple[int, ...], Product | None] = {}

    def find_bit_equal(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Product | None:
        """Returns the first way that has the bits of the reference for this size; None if there is none. For a new size
        it waits for the device and overwrites `out`."""
        key = (*x.shape, x.stride(0), *weight.shape, out.stride(0))
        if key not in self._found:
            try:
                self._found[key] = next((way for way in self._ways if self._is_equal(way, x, weight, out)), None)
            except torch.OutOfMemoryError:
                logger.warning(
                    log.event("no memory to compare a product; ours is used", rows=len(x), outputs=len(weight))
                )
                return None  # not stored, so the next batch of this size tries again
        return self._found[key]

    def run_reference(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Runs the reference as a comparison does, so that its kernels are compiled."""
        for rows, found in zip(x.split(_ROWS_AT_ONCE), out.split(_ROWS_AT_ONCE), strict=True):
            self._reference(rows, weight, torch.empty_like(found))

    def _is_equal(self, way: Product, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> bool:
        generator = torch.Generator(x.device).manual_seed(0)
        trial = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        for _ in range(-(-_CHECKED_ELEMENTS // out.numel())):
            trial.normal_(generator=generator)
            way(trial, weight, out)
            for rows, found in zip(trial.split(_ROWS_AT_ONCE), out.split(_ROWS_AT_ONCE), strict=True):
                expected = torch.empty_like(found)
                self._reference(rows, weight, expected)
                if not torch.equal(found, expected):
                    return False
        return True


@contextmanager
def _use_library(name: str) -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


@contextmanager
def _without_split_k() -> Iterator[None]:
    settings = torch.backends.cuda.matmul
    allows_less = settings.allow_bf16_reduced_precision_reduction
    allows_less_fp16 = settings.allow_fp16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = (False, False)
    settings.allow_fp16_reduced_precision_reduction = (False, False)
    try:
        with _use_library("cublaslt"):  # the only library with this setting
            yield
    finally:
        settings.allow_bf16_reduced_precision_reduction = allows_less
        settings.allow_fp16_reduced_precision_reduction = allows_less_fp16
