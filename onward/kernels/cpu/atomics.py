"""Communication between threads: atomic words, and ways to wait until they change."""

import platform
import sys
from typing import Any

from llvmlite import ir
from numba import types

from onward.kernels.cpu.llvm_vectors import I32, I64, Builder, Value, element_pointer, intrinsic

_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}
FUTEX_CALL = _FUTEX_CALLS.get(platform.machine()) if sys.platform == "linux" else None
_WAIT, _WAKE = 0, 1
"""Futex operations for threads of any process that maps the word."""
_PRIVATE = 128
"""Flag of an operation for threads of one process, which the kernel finds faster."""
_NAP_US = 50


@intrinsic
def fetch_add(typing_context, words, index, amount):
    """Adds to an int64 and returns its previous value. Everything that other threads wrote before their own access to
    the word is visible after this call, and the reverse."""

    def emit(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int64(words, types.intp, types.int64), emit


@intrinsic
def load_acquire(typing_context, words, index):
    def emit(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1])
        return builder.load_atomic(pointer, ordering="acquire", align=8)

    return types.int64(words, types.intp), emit


@intrinsic
def read_cycle_counter(typing_context):
    """Returns the core's time stamp; 0 where programs may not read it."""

    def emit(context, builder, sig, args):
        if not _is_x86(builder):
            return ir.Constant(I64, 0)
        return _call(builder, "llvm.readcyclecounter", I64)

    return types.int64(), emit


@intrinsic
def pause(typing_context):
    """Tells the core that this is a wait loop."""

    def emit(context, builder, sig, args):
        if _is_x86(builder):
            _call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def short_sleep(typing_context):
    """Leaves the core for a moment, so that the thread that is waited for can run on it."""

    def emit(context, builder, sig, args):
        _call(builder, "usleep", I32, ir.Constant(I32, _NAP_US))
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def sleep_while(typing_context, words, index, value):
    """Sleeps until another thread calls `wake_all` on this word, unless its low half differs from `value` already. May
    return early."""
    return types.void(words, types.intp, types.int64), _sleep_emitter(_PRIVATE)


@intrinsic
def sleep_while_shared(typing_context, words, index, value):
    """Sleeps like `sleep_while`, on a word in memory that other processes map; `wake_all_shared` ends it."""
    return types.void(words, types.intp, types.int64), _sleep_emitter(0)


@intrinsic
def wake_all(typing_context, words, index):
    return types.void(words, types.intp), _wake_emitter(_PRIVATE)


@intrinsic
def wake_all_shared(typing_context, words, index):
    return types.void(words, types.intp), _wake_emitter(0)


def _sleep_emitter(flag: int) -> Any:
    def emit(context, builder, sig, args):
        if FUTEX_CALL is None:
            _call(builder, "usleep", I32, ir.Constant(I32, 4 * _NAP_US))
        else:
            _futex(context, builder, sig, args, _WAIT | flag, args[2])
        return context.get_dummy_value()

    return emit


def _wake_emitter(flag: int) -> Any:
    def emit(context, builder, sig, args):
        if FUTEX_CALL is not None:
            _futex(context, builder, sig, args, _WAKE | flag, ir.Constant(I64, 1 << 30))
        return context.get_dummy_value()

    return emit


def _is_x86(builder: Builder) -> bool:
    return builder.module.triple.startswith(("x86_64", "i686"))


def _futex(context: Any, builder: Builder, sig: Any, args: Any, operation: int, value: Value) -> None:
    pointer = element_pointer(context, builder, sig.args[0], args[0], args[1])
    no_timeout = ir.Constant(I64, 0)
    call = ir.Constant(I64, FUTEX_CALL)
    _call(builder, "syscall", I64, call, pointer, ir.Constant(I64, operation), value, no_timeout, variadic_from=1)


def _call(builder: Builder, name: str, result: ir.Type, *args: Value, variadic_from: int | None = None) -> Value:
    function = builder.module.globals.get(name)
    if function is None:
        fixed = [a.type for a in args[:variadic_from]]
        kind = ir.FunctionType(result, fixed, var_arg=variadic_from is not None)
        function = ir.Function(builder.module, kind, name)
    return builder.call(function, args)
