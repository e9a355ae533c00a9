"""Compiles kernels: by numba, cached on disk, without fast-math.

A kernel is a C function (thread, context): every thread of `threads.ThreadPool` may call it, and `context` is a structure
of sizes and addresses. numba's own parallel loops would compile each kernel seven times over.

The cache folder is named after a hash of the kernels' sources and the level of `dot_instruction`, because numba itself
only looks at the file of the outermost function. Inside, numba keys by the CPU that it compiles for, so levels of
`ONWARD_SIMD` share nothing. Fast-math stays off everywhere: the order of float operations is part of the result.
"""

import ctypes
import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import config

from onward.config import cache_dir
from onward.kernels.cpu.dot_instruction import best_level
from onward.kernels.cpu.llvm_vectors import Builder, intrinsic
from onward.kernels.cpu.target import kernel_target
from onward.log import event

logger = logging.getLogger(__name__)


def _cache_folder() -> Path:
    digest = hashlib.blake2b(digest_size=8)
    here = Path(__file__).parent
    for path in sorted([*here.glob("*.py"), *here.parent.glob("*.py")]):
        digest.update(path.name.encode() + path.read_bytes())
    return cache_dir() / "kernels" / f"{digest.hexdigest()}-{best_level()}"


config.CACHE_DIR = str(_cache_folder())  # pyright: ignore[reportAttributeAccessIssue]
# Kernels that cannot be written to our folder go to the user's; numba's default would try the package's folder first.
config.CACHE_LOCATOR_CLASSES = "onward.kernels.cpu.cache_locator.KernelCacheLocator,UserWideCacheLocator"  # pyright: ignore[reportAttributeAccessIssue]
config.CPU_NAME = kernel_target().cpu  # pyright: ignore[reportAttributeAccessIssue]
config.CPU_FEATURES = kernel_target().features  # pyright: ignore[reportAttributeAccessIssue]

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_INNER: dict[str, Any] = _OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def kernel_function(function: Any) -> Any:
    """Decorates a function that only kernels call."""
    return numba.njit(**_INNER, forceinline=False)(function)  # explicit, because it would inherit its caller's value


def inlined_kernel_function(function: Any) -> Any:
    """Decorates a function that only kernels call, and that is small enough to be inlined."""
    return numba.njit(**_INNER, forceinline=True)(function)


def compile_cached(signature: Any, function: Any, **options: Any) -> Any:
    """Returns a C function, compiled or from the cache. If the cache folder cannot be written and lacks the function,
    it is compiled at each start."""
    try:
        return numba.cfunc(signature, cache=True, **options)(function)
    except (OSError, RuntimeError) as fault:
        logger.warning(event("kernel not cached", kernel=function.__name__, why=fault))
        return numba.cfunc(signature, **options)(function)


class Kernel:
    """A kernel, compiled or loaded from the cache when its address is first read."""

    def __init__(self, function: Callable[[Any, Any], None], context: np.dtype) -> None:
        self._function, self.context = function, context

    @functools.cached_property
    def _compiled(self) -> Any:
        signature = types.void(types.int64, types.CPointer(numba.from_dtype(self.context)))
        return compile_cached(signature, self._function, error_model="numpy")

    @property
    def address(self) -> int:
        return self._compiled.address

    def run_on_caller(self, context: np.ndarray) -> None:
        """Runs on the caller's thread, for kernels that do not share their work. The caller keeps the memory that
        `context` points to alive."""
        assert context.dtype == self.context
        self._call(0, context.ctypes.data)

    @functools.cached_property
    def _call(self) -> Callable[[int, int], None]:
        return ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)(self.address)


@intrinsic
def out_of_line(typing_context: Any) -> Any:
    """Prevents inlining of the kernel function that calls this, which is for large ones: code size is compile time."""

    def emit(ctx: Any, builder: Builder, sig: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return ctx.get_dummy_value()

    return types.void(), emit
