"""Threads of several processes that share a kernel's items: tensor parallelism on one machine.

Each process is a rank. Rank 0 leads: it offers a run in `control`, words in memory that all ranks map. The threads of the
other ranks join a run as helpers join one in `threads`: those that arrive while it is open enter it, and rank 0 waits
only for those. Items are claimed from `work`, which is shared too. So the results are those of one process with as many
threads, bit by bit.

A context holds addresses, which differ between processes, so each rank has a context of its own. The fields that differ
between runs are `RUN_FIELDS`. Rank 0 publishes them with the offer.

A rank that dies inside a run leaves rank 0 waiting. The supervisor ends the whole group then.
"""

import ctypes
import functools
import threading
import weakref
from typing import Any

import numpy as np
from numba import types

from onward.kernels.cpu import simd
from onward.kernels.cpu.atomics import (
    fetch_add,
    load_acquire,
    pause,
    short_sleep,
    sleep_while_shared,
    wake_all_shared,
)
from onward.kernels.cpu.jit import Kernel, compile_cached
from onward.kernels.cpu.threads import OPEN, SPINS_BEFORE_NAP, SPINS_BEFORE_SLEEP, ThreadPool, call_kernel
from onward.proto.rank import MAX_RANKS

RUN_FIELDS = ("num_rows", "num_tiles", "num_sampled")
"""Fields of the context that differ between runs. All others are sizes and addresses that stay the same."""

# Words of `control`. `_OFFER` and `_STATE` are those of `threads`, each on a cache line of its own.
_OFFER, _STATE, _STOPPED, _RUN, _JOINED = 0, 8, 16, 24, 32
NUM_CONTROL_WORDS = _JOINED + MAX_RANKS
_NUM_RUN_FIELDS = len(RUN_FIELDS)


def _open_run(control):
    fetch_add(control, _STATE, OPEN)
    fetch_add(control, _OFFER, 1)
    wake_all_shared(control, _OFFER)


def _close_run(control):
    """Closes the run, and waits for the threads of other ranks that have entered it."""
    fetch_add(control, _STATE, -OPEN)
    spins = 0
    while load_acquire(control, _STATE) != 0:
        spins += 1
        if spins < SPINS_BEFORE_NAP:
            pause()
        else:
            short_sleep()


def _stop_runs(control):
    """Ends the runs: a thread that is woken finds no run open."""
    fetch_add(control, _STOPPED, 1)
    fetch_add(control, _OFFER, 1)
    wake_all_shared(control, _OFFER)


def _join_runs(control, rank, thread, kernel, context, field_at):
    """Takes part in rank 0's runs until they stop. `context` is the address of this rank's own; `field_at` has the index
    of each of `RUN_FIELDS` in it, in words."""
    words, seen = simd.int64s(context), 0
    while load_acquire(control, _STOPPED) == 0:
        spins = 0
        while load_acquire(control, _OFFER) == seen:
            spins += 1
            if spins < SPINS_BEFORE_SLEEP:
                pause()
            else:
                sleep_while_shared(control, _OFFER, seen)
        seen = load_acquire(control, _OFFER)
        if fetch_add(control, _STATE, 1) >= OPEN:
            for field in range(_NUM_RUN_FIELDS):
                words[field_at[field]] = control[_RUN + field]
            fetch_add(control, _JOINED + rank, 1)
            call_kernel(kernel, thread, context)
        fetch_add(control, _STATE, -1)


_WORDS = types.CPointer(types.int64)
_POINTER = ctypes.POINTER(ctypes.c_int64)


@functools.cache
def _compiled_open() -> Any:
    return compile_cached(types.void(_WORDS), _open_run)


@functools.cache
def _compiled_close() -> Any:
    return compile_cached(types.void(_WORDS), _close_run)


@functools.cache
def _compiled_stop() -> Any:
    return compile_cached(types.void(_WORDS), _stop_runs)


@functools.cache
def _compiled_join() -> Any:
    return compile_cached(types.void(_WORDS, *[types.int64] * 4, _WORDS), _join_runs)


def _words(array: np.ndarray) -> Any:
    return array.ctypes.data_as(_POINTER)


class LeadingThreads:
    """The threads of all ranks, as rank 0 uses them. Its own are `threads`. The runs end for the other ranks when this is
    no longer referred to."""

    def __init__(self, threads: ThreadPool, control: np.ndarray, num_ranks: int) -> None:
        assert 1 <= num_ranks <= MAX_RANKS, "the control words have room for every rank"
        self.size = threads.size * num_ranks
        self._threads, self._control = threads, control
        self._open, self._close = _compiled_open().ctypes, _compiled_close().ctypes
        self._pointer = _words(control)
        weakref.finalize(self, _compiled_stop().ctypes, self._pointer)

    def run(self, kernel: Kernel, context: np.ndarray) -> None:
        """Runs a kernel on the threads of all ranks; the other ranks have given theirs to `FollowingThreads`."""
        self._control[_RUN : _RUN + _NUM_RUN_FIELDS] = [context[name] for name in RUN_FIELDS]
        self._open(self._pointer)
        self._threads.run(kernel, context)
        self._close(self._pointer)


class FollowingThreads:
    """The threads of a rank other than 0."""

    def __init__(self, control: np.ndarray, rank: int, num_threads: int, num_ranks: int) -> None:
        assert 0 < rank < num_ranks, "rank 0 leads"
        self.size = num_threads * num_ranks
        self._control, self._rank, self._num_threads = control, rank, num_threads
        self._join = _compiled_join().ctypes  # here, because a rank that compiles in `run` misses the first steps

    def run(self, kernel: Kernel, context: np.ndarray) -> None:
        """Takes part in rank 0's runs of this kernel. Returns when rank 0 has stopped them."""
        words = kernel.context
        assert words.fields is not None, "a context is a structure"
        field_at = np.array([words.fields[name][1] // 8 for name in RUN_FIELDS], np.int64)

        def join(thread: int) -> None:
            self._join(_words(self._control), self._rank, thread, kernel.address, context.ctypes.data, _words(field_at))

        first = self._rank * self._num_threads
        helpers = [threading.Thread(target=join, args=(first + i,), daemon=True) for i in range(1, self._num_threads)]
        for helper in helpers:
            helper.start()
        join(first)
        for helper in helpers:
            helper.join()


def num_joined(control: np.ndarray) -> list[int]:
    """Returns, for each rank, how often its threads have entered a run. Rank 0 leads and counts none."""
    return control[_JOINED : _JOINED + MAX_RANKS].tolist()
