"""Threads of several ranks share a kernel's items: each rank with a context of its own."""

import gc
import threading

import numpy as np
import pytest
from numba import carray

from onward.kernels.cpu import simd
from onward.kernels.cpu.atomics import pause
from onward.kernels.cpu.jit import Kernel
from onward.kernels.cpu.phases import WORDS_PER_PHASE, claim_items, mark_finished, wait_for_phase
from onward.kernels.cpu.rank_threads import (
    NUM_CONTROL_WORDS,
    RUN_FIELDS,
    FollowingThreads,
    LeadingThreads,
    _compiled_join,
    num_joined,
)
from onward.kernels.cpu.threads import ThreadPool

CONTEXT = np.dtype([(name, np.int64) for name in ("work", "rank", "cells", *RUN_FIELDS, "ranks")], align=True)
NUM_CELLS = 50


def _mark(thread, context):
    """Writes number of rows + index into each cell, and which rank has written it."""
    c = carray(context, 1)[0]
    work, cells, ranks = simd.int64s(c.work), simd.int64s(c.cells), simd.int64s(c.ranks)
    i = claim_items(work, 0, 0, 1)
    while i < c.num_tiles:
        for _ in range(2000):
            pause()
        cells[i] = c.num_rows + i
        ranks[i] = c.rank
        mark_finished(work, 0, 1)
        i = claim_items(work, 0, 0, 1)
    wait_for_phase(work, 0, c.num_tiles)


MARK = Kernel(_mark, CONTEXT)


class Ranks:
    """Ranks in one process: what is shared is the control words and three arrays."""

    def __init__(self, num_ranks: int, num_threads: int, *, do_others_start: bool = True) -> None:
        self.work, self.cells, self.ranks = np.zeros(WORDS_PER_PHASE, np.int64), *np.zeros((2, NUM_CELLS), np.int64)
        self.control = np.zeros(NUM_CONTROL_WORDS, np.int64)
        self.context = self._new_context(0)
        self.leader = LeadingThreads(ThreadPool(num_threads), self.control, num_ranks)
        self.followers = [
            threading.Thread(
                target=FollowingThreads(self.control, rank, num_threads, num_ranks).run,
                args=(MARK, self._new_context(rank)),
                daemon=True,
            )
            for rank in range(1, num_ranks)
        ]
        for follower in self.followers if do_others_start else ():
            follower.start()

    def _new_context(self, rank: int) -> np.ndarray:
        context = np.zeros((), CONTEXT)
        for name in ("work", "cells", "ranks"):
            context[name] = getattr(self, name).ctypes.data
        context["rank"] = rank
        return context

    def run(self, num_rows: int, num_cells: int) -> None:
        self.work[:], self.cells[:], self.ranks[:] = 0, 0, -1
        self.context["num_rows"], self.context["num_tiles"] = num_rows, num_cells
        self.leader.run(MARK, self.context)

    def stop(self) -> None:
        del self.leader
        gc.collect()
        for follower in self.followers:
            follower.join(timeout=30)
            assert not follower.is_alive(), "a rank leaves when the runs have stopped"


@pytest.mark.parametrize(("num_ranks", "num_threads"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_every_rank_sees_the_fields_of_the_run_and_no_item_is_left_out(num_ranks: int, num_threads: int) -> None:
    ranks = Ranks(num_ranks, num_threads)
    for run in range(300):
        num_cells = run % NUM_CELLS
        ranks.run(1000 * run, num_cells)
        expected = np.zeros(NUM_CELLS, np.int64)
        expected[:num_cells] = 1000 * run + np.arange(num_cells)
        np.testing.assert_array_equal(ranks.cells, expected)
    ranks.stop()


def test_each_rank_takes_part() -> None:
    ranks = Ranks(3, 1)
    computed: set[int] = set()
    while computed != {0, 1, 2}:  # a rank that never joins is found by the timeout of the test
        ranks.run(1, NUM_CELLS)
        computed |= set(ranks.ranks.tolist())
    assert num_joined(ranks.control)[0] == 0
    assert all(count > 0 for count in num_joined(ranks.control)[1:3])
    ranks.stop()


def test_a_rank_that_comes_late_is_not_waited_for() -> None:
    ranks = Ranks(4, 1, do_others_start=False)
    ranks.run(7, NUM_CELLS)
    np.testing.assert_array_equal(ranks.cells, 7 + np.arange(NUM_CELLS))


def test_a_rank_has_compiled_how_it_joins_before_it_runs() -> None:
    _compiled_join.cache_clear()
    FollowingThreads(np.zeros(NUM_CONTROL_WORDS, np.int64), 1, 1, 2)
    assert _compiled_join.cache_info().currsize == 1
