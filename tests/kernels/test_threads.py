"""The pool that kernels run on."""

import gc
import threading

import numpy as np
import pytest
from numba import carray

from onward.kernels.cpu import simd
from onward.kernels.cpu.atomics import pause
from onward.kernels.cpu.jit import Kernel
from onward.kernels.cpu.phases import WORDS_PER_PHASE, claim_items, mark_finished, wait_for_phase
from onward.kernels.cpu.threads import ThreadPool

CONTEXT = np.dtype([(name, np.int64) for name in ("work", "num_phases", "size", "cells")])


def _ripple(thread, context):
    """Each phase adds its left neighbour's value of the phase before: wrong if a phase starts before another ends."""
    c = carray(context, 1)[0]
    work, cells = simd.int64s(c.work), simd.int64s(c.cells)
    for phase in range(c.num_phases):
        i = claim_items(work, phase, 0, 1)
        while i < c.size:
            for _ in range((i * 7 + phase * 5) % 11 * 100):  # some items take long, so that threads drift apart
                pause()
            before = cells[phase * c.size + i] + cells[phase * c.size + (i + 1) % c.size]
            cells[(phase + 1) * c.size + i] = before & 0xFFFFFF
            mark_finished(work, phase, 1)
            i = claim_items(work, phase, 0, 1)
        wait_for_phase(work, phase, c.size)


RIPPLE = Kernel(_ripple, CONTEXT)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_phases_follow_each_other_whoever_does_the_work(size: int) -> None:
    pool = ThreadPool(size)
    phases, width = 20, 7
    cells, work = np.zeros((phases + 1, width), np.int64), np.zeros((phases, WORDS_PER_PHASE), np.int64)
    context = np.zeros((), CONTEXT)
    context["work"], context["cells"] = work.ctypes.data, cells.ctypes.data
    context["num_phases"], context["size"] = phases, width
    for run in range(100):
        cells[0] = np.arange(width) + run
        work[:] = 0
        pool.run(RIPPLE, context)
        expected = np.arange(width) + run
        for _ in range(phases):
            expected = (expected + np.roll(expected, -1)) & 0xFFFFFF
        np.testing.assert_array_equal(cells[phases], expected)


def test_helpers_leave_when_the_pool_is_gone() -> None:
    before = set(threading.enumerate())
    pool = ThreadPool(3)
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 2
    del pool
    gc.collect()
    for helper in helpers:
        helper.join(timeout=30)
        assert not helper.is_alive()
