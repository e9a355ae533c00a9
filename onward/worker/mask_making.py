"""Masks are made at once where that is likely to be quick, and by other threads where it is not.

Most masks take some microseconds, much less than it takes to hand work to a thread, to wait for it, and to get the
interpreter back. Others take milliseconds, and nobody but their own stream should wait for those.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from onward.grammar.matcher import Mask

QUICK_S = 0.0003
"""Who has lately needed more leaves it to the threads."""
MOST_AT_ONCE_S = 0.01
"""Of everybody together, if nothing was made at once for a while."""
SHARE_AT_ONCE = 0.5
"""Of the time that is spent otherwise, in the long run: so much may be slow after all, and hold up the others."""


@dataclass(frozen=True, slots=True)
class Made:
    """A mask that is there, or why there is none."""

    mask: Mask | None
    fault: Exception | None = None

    def done(self) -> bool:
        return True

    def result(self) -> Mask:
        if self.mask is None:
            assert self.fault is not None
            raise self.fault
        return self.mask


NextMask = Made | Future[Mask]


class MaskMaking(Protocol):
    def make(self, work: Callable[[], Mask], likely_s: float) -> NextMask:
        """`work` has about this long to do."""
        ...


class MaskMaker:
    """Asked by one thread. It starts no other before the first mask that needs one."""

    def __init__(self, num_threads: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="mask")
        self._clock = clock
        self._left_s, self._seen_s = MOST_AT_ONCE_S, clock()

    def make(self, work: Callable[[], Mask], likely_s: float) -> NextMask:
        now_s = self._clock()
        self._left_s = min(MOST_AT_ONCE_S, self._left_s + SHARE_AT_ONCE * (now_s - self._seen_s))
        self._seen_s = now_s
        if likely_s > QUICK_S or self._left_s <= 0:
            return self._threads.submit(work)
        made = made_at_once(work)
        self._seen_s = self._clock()
        self._left_s -= self._seen_s - now_s
        return made


def made_at_once(work: Callable[[], Mask]) -> Made:
    try:
        return Made(work())
    except Exception as fault:  # it belongs to who asks for the mask
        return Made(None, fault)


def wait_for_one(masks: Sequence[NextMask], limit_s: float) -> None:
    wait(_under_way(masks), limit_s, FIRST_COMPLETED)


def wait_for_all(masks: Sequence[NextMask], limit_s: float | None = None) -> None:
    wait(_under_way(masks), limit_s)


def _under_way(masks: Sequence[NextMask]) -> list[Future[Mask]]:
    return [mask for mask in masks if not isinstance(mask, Made)]
