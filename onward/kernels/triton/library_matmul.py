"""The matrix library's products, where they have the bits of our own.

`linear` defines a product's bits: inputs are added up in their order. The library's kernels do the same, and are faster for
many rows, unless they cut the inputs into parts for several programs ("split-K"), which some sizes do. Which kernel a size
gets is the library's own decision and may change with its version. So each size is tried before it is used: if one of 16
million elements differs from `linear`, another way is tried, and `linear` stays if none is left.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from onward import log

logger = logging.getLogger(__name__)

_CHECKED_ELEMENTS = 1 << 24
"""A kernel that cuts the inputs of a tenth of its tiles only still differs in hundreds of these."""
_ROWS_AT_ONCE = 1024
"""Compared at once: large batches have little memory to spare."""

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""x [rows, inputs], weight [outputs, inputs], out [rows, outputs]."""


def default_matmul(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(x, weight.T, out=out)


def matmul_without_split_k(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Never cuts the inputs. Slower where the default one does not either."""
    with _without_split_k():
        torch.mm(x, weight.T, out=out)


class LibraryMatmuls:
    """For each size the first of the library's ways that has the bits of the reference; None if there is none."""

    def __init__(self, reference: Product, ways: Sequence[Product] = (default_matmul, matmul_without_split_k)) -> None:
        self._reference, self._ways = reference, ways
        self._found: dict[tuple[int, ...], Product | None] = {}

    def find_bit_equal(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Product | None:
        """Waits for the device, and overwrites `out`, when it sees a size for the first time."""
        key = (*x.shape, x.stride(0), *weight.shape, out.stride(0))
        if key not in self._found:
            try:
                self._found[key] = next((way for way in self._ways if self._is_equal(way, x, weight, out)), None)
            except torch.OutOfMemoryError:
                logger.warning(
                    log.event("no memory to compare a product; ours is used", rows=len(x), outputs=len(weight))
                )
                return None  # and tried again with the next batch of this size
        return self._found[key]

    def run_reference(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """As a comparison runs it, for its kernels to be compiled."""
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
def _without_split_k() -> Iterator[None]:
    settings = torch.backends.cuda.matmul
    allows_less = settings.allow_bf16_reduced_precision_reduction
    allows_less_fp16 = settings.allow_fp16_reduced_precision_reduction
    library = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")  # the only one that takes this setting
    settings.allow_bf16_reduced_precision_reduction = (False, False)
    settings.allow_fp16_reduced_precision_reduction = (False, False)
    try:
        yield
    finally:
        settings.allow_bf16_reduced_precision_reduction = allows_less
        settings.allow_fp16_reduced_precision_reduction = allows_less_fp16
        torch.backends.cuda.preferred_blas_library(library)
