"""Every launch of a kernel, so that all kernels of a step can be compiled before the first one runs, by several processes.

Triton compiles a kernel when it is first launched, in about half a second that other threads cannot use. Within
`compile_share` nothing is launched; of the kernels that would have been, every n-th is compiled into Triton's cache.
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
        """Whether this one is new and ours. All processes see the same kernels in the same order."""
        key = _variant(kernel, args, options)
        if key in self.seen:
            return False
        number = len(self.seen)
        self.seen.add(key)
        return number % self.of == self.part


_share: ContextVar[_CompileShare | None] = ContextVar("share", default=None)


def _variant(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Hashable:
    """What Triton compiles once."""
    kinds = tuple(None if p.do_not_specialize else _kind(arg) for p, arg in zip(kernel.params, args, strict=False))
    return kernel.__name__, kinds, tuple(sorted((k, _constant(v)) for k, v in options.items()))


def _kind(arg: Any) -> Hashable:
    """What Triton makes a kernel of its own for: types, ones, and multiples of 16."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, int):
        return arg == 1, arg % 16 == 0
    return type(arg), tuple(getattr(arg, "block_shape", ()))


def _constant(value: Any) -> Hashable:
    return value if isinstance(value, Hashable) else repr(value)


def is_launching() -> bool:
    """Whether kernels run when they are launched, or are only noted or compiled."""
    return _share.get() is None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    share = _share.get()
    if share is None:
        kernel[grid](*args, **options)
    elif share.takes(kernel, args, options):
        compiled = kernel.warmup(*args, grid=grid, **options)
        assert compiled.run is not None  # asking for it builds what launches the kernel, which is cached too


@contextmanager
def record_variants() -> Iterator[set[Hashable]]:
    """Nothing is launched or compiled; the variants that would have been are in the set."""
    share = _CompileShare(1, 1)  # the second of one: nobody's
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
