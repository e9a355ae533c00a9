"""Masks are made at once where that is likely to be quick, and by other threads where it is not.

Most masks take some microseconds, much less than it takes to hand work to a thread, to wait for it, and to get the
interpreter back. Others take milliseconds, and nobody but their own stream should wait for those.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from onward.grammar.matcher import TokenBitmask

INLINE_LIMIT_S = 0.0003
"""Who has lately needed more leaves it to the threads."""
MAX_INLINE_BUDGET_S = 0.01
"""Of everybody together, if nothing was made at once for a while."""
INLINE_BUDGET_SHARE = 0.5
"""Of the time that is spent otherwise, in the long run: so much may be slow after all, and hold up the others."""


@dataclass(frozen=True, slots=True)
class CompletedMask:
    """A mask that is there, or why there is none."""

    mask: TokenBitmask | None
    fault: Exception | None = None

    def __post_init__(self) -> None:
        assert (self.mask is None) != (self.fault is None), "a completed mask has either bits or a fault"

    def done(self) -> bool:
        return True

    def result(self) -> TokenBitmask:
        if self.mask is None:
            assert self.fault is not None, "a completed mask without bits has a fault"
            raise self.fault
        return self.mask


NextMask = CompletedMask | Future[TokenBitmask]


class MaskExecutor(Protocol):
    def submit(self, compute: Callable[[], TokenBitmask], expected_s: float) -> NextMask:
        """`compute` is expected to take this long."""
        ...


class ThreadedMaskExecutor:
    """Asked by one thread. It starts no other before the first mask that needs one."""

    def __init__(self, num_threads: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="mask")
        self._clock = clock
        self._inline_budget_s, self._updated_s = MAX_INLINE_BUDGET_S, clock()

    def submit(self, compute: Callable[[], TokenBitmask], expected_s: float) -> NextMask:
        now_s = self._clock()
        self._inline_budget_s = min(
            MAX_INLINE_BUDGET_S, self._inline_budget_s + INLINE_BUDGET_SHARE * (now_s - self._updated_s)
        )
        self._updated_s = now_s
        if expected_s > INLINE_LIMIT_S or self._inline_budget_s <= 0:
            return self._threads.submit(compute)
        mask = compute_inline(compute)
        self._updated_s = self._clock()
        self._inline_budget_s -= self._updated_s - now_s
        return mask


def compute_inline(compute: Callable[[], TokenBitmask]) -> CompletedMask:
    try:
        return CompletedMask(compute())
    except Exception as fault:  # it belongs to who asks for the mask
        return CompletedMask(None, fault)


def wait_for_one(masks: Sequence[NextMask], limit_s: float) -> None:
    wait(_pending(masks), limit_s, FIRST_COMPLETED)


def wait_for_all(masks: Sequence[NextMask], limit_s: float | None = None) -> None:
    wait(_pending(masks), limit_s)


def _pending(masks: Sequence[NextMask]) -> list[Future[TokenBitmask]]:
    return [mask for mask in masks if not isinstance(mask, CompletedMask)]
