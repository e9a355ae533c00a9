"""Launches kernels. All launches go through here, so that several processes can compile all kernels of a step before
the first one runs.

Triton compiles a kernel when it is first launched, in about half a second that other threads cannot use. Within
`compile_share` nothing is launched; every n-th of the kernels that would be launched is compiled into Triton's cache.
"""

# Triton is not installed everywhere.
# pyright: reportMissingImports=false

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class _CompileShare:
    part: int
    of: int
    seen: set[Hashable] = field(default_factory=set)

    def takes(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Returns whether this kernel is new and belongs to this part. All processes see the same kernels in the same
        order."""
        key = _variant(kernel, args, options)
        if key in self.seen:
            return False
        number = len(self.seen)
        self.seen.add(key)
        return number % self.of == self.part


_share: ContextVar[_CompileShare | None] = ContextVar("share", default=None)


def _variant(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Hashable:
    """Returns a key that is equal for all launches that share one compiled kernel."""
    kinds = tuple(None if p.do_not_specialize else _kind(arg) for p, arg in zip(kernel.params, args, strict=False))
    return kernel.__name__, kinds, tuple(sorted((k, _constant(v)) for k, v in options.items()))


def _kind(arg: Any) -> Hashable:
    """Returns the properties of an argument for which Triton compiles separate kernels: types, ones, and multiples of
    16."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, int):
        return arg == 1, arg % 16 == 0
    return type(arg), tuple(getattr(arg, "block_shape", ()))


def _constant(value: Any) -> Hashable:
    return value if isinstance(value, Hashable) else repr(value)


def is_launching() -> bool:
    """Returns whether `launch` runs kernels. Otherwise it only records or compiles them."""
    return _share.get() is None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    share = _share.get()
    if share is None:
        kernel[grid](*args, **options)
    elif share.takes(kernel, args, options):
        compiled = kernel.warmup(*args, grid=grid, **options)
        assert compiled.run is not None  # reading it builds the kernel's launcher, which is cached too


@contextmanager
def record_variants() -> Iterator[set[Hashable]]:
    """Records the variants of kernels in a set; within the context nothing is launched or compiled."""
    share = _CompileShare(1, 1)  # part 1 of 1 takes no kernel: parts count from 0
    token = _share.set(share)
    try:
        yield share.seen
    finally:
        _share.reset(token)


@contextmanager
def compile_share(part: int, num_parts: int) -> Iterator[None]:
    token = _share.set(_CompileShare(part, num_parts))
    try:
        yield
    finally:
        _share.reset(token)
