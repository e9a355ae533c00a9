"""The threads that kernels run on: a leader, and helpers that join when they can.

A helper waits until a kernel is offered, first spinning and soon asleep. It enters the kernel if that is still open
when the helper arrives. The leader waits for helpers that have entered, not for helpers that have not arrived yet: on
busy cores it never waits for a thread that the system does not run. (A pool of OpenMP would, and would spin on a core
that the engine needs.) This is correct for kernels whose items are claimed through `phases`, and only for those.
"""

import ctypes
import functools
import threading
import weakref
from typing import Any, Protocol

import numpy as np
from llvmlite import ir
from numba import types

from onward.kernels.cpu.atomics import fetch_add, load_acquire, pause, short_sleep, sleep_while, wake_all
from onward.kernels.cpu.jit import Kernel, compile_cached
from onward.kernels.cpu.llvm_vectors import Builder, intrinsic

# Words of the control block, each on a cache line of its own.
_OFFER, _STATE, _KERNEL, _CONTEXT, _STOPPED = 0, 8, 16, 17, 24
_NUM_WORDS = 32
OPEN = 1 << 32
"""Set in `_STATE` while helpers may enter; the lower bits count the helpers that are inside."""
SPINS_BEFORE_SLEEP = 1500
SPINS_BEFORE_NAP = 4000


@intrinsic
def call_kernel(typing_context: Any, address: Any, thread: Any, context: Any) -> Any:
    def emit(ctx: Any, builder: Builder, sig: Any, args: Any) -> Any:
        word = ir.IntType(64)
        function = ir.FunctionType(ir.VoidType(), [word, word]).as_pointer()
        builder.call(builder.inttoptr(args[0], function), args[1:])
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


def _help(thread, control):
    """Runs as a helper until the pool stops: enters each offered kernel that is still open."""
    seen = 0
    while load_acquire(control, _STOPPED) == 0:
        spins = 0
        while load_acquire(control, _OFFER) == seen:
            spins += 1
            if spins < SPINS_BEFORE_SLEEP:
                pause()
            else:
                sleep_while(control, _OFFER, seen)
        seen = load_acquire(control, _OFFER)
        if fetch_add(control, _STATE, 1) >= OPEN:
            call_kernel(control[_KERNEL], thread, control[_CONTEXT])
        fetch_add(control, _STATE, -1)


def _lead(control, kernel, context):
    """Offers a kernel, runs it as thread 0, closes it, and waits for the helpers that have entered."""
    control[_KERNEL] = kernel
    control[_CONTEXT] = context
    fetch_add(control, _STATE, OPEN)
    fetch_add(control, _OFFER, 1)
    wake_all(control, _OFFER)
    call_kernel(kernel, 0, context)
    fetch_add(control, _STATE, -OPEN)
    spins = 0
    while load_acquire(control, _STATE) != 0:
        spins += 1
        if spins < SPINS_BEFORE_NAP:
            pause()
        else:
            short_sleep()


_CONTROL = types.CPointer(types.int64)


@functools.cache
def _compiled_help() -> Any:
    return compile_cached(types.void(types.int64, _CONTROL), _help)


@functools.cache
def _compiled_lead() -> Any:
    return compile_cached(types.void(_CONTROL, types.int64, types.int64), _lead)


class KernelThreads(Protocol):
    """Threads that share a kernel's items."""

    @property
    def size(self) -> int:
        """The highest number of threads that may run a kernel. Each has a number below it."""
        ...

    def run(self, kernel: Kernel, context: np.ndarray) -> None: ...


class ThreadPool:
    """`size` threads, the caller's included. Helpers end when the pool is no longer referred to."""

    def __init__(self, size: int) -> None:
        assert size >= 1
        self.size = size
        self._control = np.zeros(_NUM_WORDS, np.int64)
        self._pointer = self._control.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
        self._lead = _compiled_lead().ctypes
        for thread in range(1, size):
            target = functools.partial(_run_helper, thread, self._control)
            threading.Thread(target=target, name=f"kernel-{thread}", daemon=True).start()
        weakref.finalize(self, _stop, self._control)

    def run(self, kernel: Kernel, context: np.ndarray) -> None:
        """Runs a kernel; one run at a time. `context` holds addresses, and the caller keeps the memory that they point
        to alive."""
        assert context.dtype == kernel.context
        self._lead(self._pointer, kernel.address, context.ctypes.data)


def _run_helper(thread: int, control: np.ndarray) -> None:
    _compiled_help().ctypes(thread, control.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)))


def _nothing(thread, context):
    pass


_NOTHING = Kernel(_nothing, np.dtype([("unused", np.int64)]))


def _stop(control: np.ndarray) -> None:
    """Ends the helpers. Offers an empty kernel, so that sleeping helpers wake up and see that the pool has stopped."""
    control[_STOPPED] = 1
    context = np.zeros((), _NOTHING.context)
    pointer = control.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
    _compiled_lead().ctypes(pointer, _NOTHING.address, context.ctypes.data)
