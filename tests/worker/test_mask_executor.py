"""Masks are made by the thread that asks, or by another one."""

import math
import threading

import pytest

from onward.grammar.matcher import TokenBitmask
from onward.worker.logits_processors.mask_executor import (
    INLINE_BUDGET_SHARE,
    INLINE_LIMIT_S,
    MAX_INLINE_BUDGET_S,
    CompletedMask,
    NextMask,
    ThreadedMaskExecutor,
    wait_for_all,
)

MASK = TokenBitmask(b"\x01", may_end=False)


class Workshop:
    """A maker whose masks take as long as the test says."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._maker = ThreadedMaskExecutor(1, lambda: self.now_s)

    def submit(self, likely_s: float, takes_s: float = 0.0) -> NextMask:
        def work() -> TokenBitmask:
            self.now_s += takes_s
            return MASK

        made = self._maker.submit(work, likely_s)
        wait_for_all([made])
        assert made.result() is MASK
        return made

    def is_made_at_once(self, likely_s: float = 0.0, takes_s: float = 0.0) -> bool:
        return isinstance(self.submit(likely_s, takes_s), CompletedMask)


def test_a_mask_that_is_likely_to_be_quick_is_there_at_once() -> None:
    assert Workshop().is_made_at_once(INLINE_LIMIT_S)


def test_a_mask_that_may_take_long_is_made_by_another_thread_and_its_asker_goes_on() -> None:
    go_on = threading.Event()

    def work() -> TokenBitmask:
        assert go_on.wait(10)
        return MASK

    made = ThreadedMaskExecutor(1).submit(work, math.inf)
    assert not made.done()
    go_on.set()
    wait_for_all([made])
    assert made.result() is MASK


def test_masks_that_are_slow_after_all_do_not_hold_up_everybody_for_long() -> None:
    workshop = Workshop()
    assert workshop.is_made_at_once(takes_s=3 * MAX_INLINE_BUDGET_S)
    assert not workshop.is_made_at_once()
    workshop.now_s += 2 * MAX_INLINE_BUDGET_S / INLINE_BUDGET_SHARE - 1e-6
    assert not workshop.is_made_at_once()
    workshop.now_s += 2e-6
    assert workshop.is_made_at_once()


def test_what_was_not_used_is_not_saved_up() -> None:
    workshop = Workshop()
    workshop.now_s += 3600
    assert workshop.is_made_at_once(takes_s=MAX_INLINE_BUDGET_S)
    assert not workshop.is_made_at_once()


def test_a_mask_that_cannot_be_made_says_why_to_who_asks_for_it() -> None:
    def work() -> TokenBitmask:
        raise ValueError("no such word")

    made = ThreadedMaskExecutor(1).submit(work, 0.0)
    assert made.done()
    with pytest.raises(ValueError, match="no such word"):
        made.result()
