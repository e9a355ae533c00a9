"""Who makes a mask: the thread that asks, or another one."""

import math
import threading

import pytest

from onward.grammar.matcher import Mask
from onward.worker.mask_making import MOST_AT_ONCE_S, QUICK_S, SHARE_AT_ONCE, Made, MaskMaker, NextMask, wait_for_all

MASK = Mask(b"\x01", may_end=False)


class Workshop:
    """A maker whose masks take as long as somebody says."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._maker = MaskMaker(1, lambda: self.now_s)

    def make(self, likely_s: float, takes_s: float = 0.0) -> NextMask:
        def work() -> Mask:
            self.now_s += takes_s
            return MASK

        made = self._maker.make(work, likely_s)
        wait_for_all([made])
        assert made.result() is MASK
        return made

    def is_made_at_once(self, likely_s: float = 0.0, takes_s: float = 0.0) -> bool:
        return isinstance(self.make(likely_s, takes_s), Made)


def test_a_mask_that_is_likely_to_be_quick_is_there_at_once() -> None:
    assert Workshop().is_made_at_once(QUICK_S)


def test_a_mask_that_may_take_long_is_made_by_another_thread_and_its_asker_goes_on() -> None:
    go_on = threading.Event()

    def work() -> Mask:
        assert go_on.wait(10)
        return MASK

    made = MaskMaker(1).make(work, math.inf)
    assert not made.done()
    go_on.set()
    wait_for_all([made])
    assert made.result() is MASK


def test_masks_that_are_slow_after_all_do_not_hold_up_everybody_for_long() -> None:
    workshop = Workshop()
    assert workshop.is_made_at_once(takes_s=3 * MOST_AT_ONCE_S)
    assert not workshop.is_made_at_once()
    workshop.now_s += 2 * MOST_AT_ONCE_S / SHARE_AT_ONCE - 1e-6
    assert not workshop.is_made_at_once()
    workshop.now_s += 2e-6
    assert workshop.is_made_at_once()


def test_what_was_not_used_is_not_saved_up() -> None:
    workshop = Workshop()
    workshop.now_s += 3600
    assert workshop.is_made_at_once(takes_s=MOST_AT_ONCE_S)
    assert not workshop.is_made_at_once()


def test_a_mask_that_cannot_be_made_says_why_to_who_asks_for_it() -> None:
    def work() -> Mask:
        raise ValueError("no such word")

    made = MaskMaker(1).make(work, 0.0)
    assert made.done()
    with pytest.raises(ValueError, match="no such word"):
        made.result()
