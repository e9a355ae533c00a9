"""Computes masks in the calling thread if that is likely to be quick, and in other threads if not.

Most masks take some microseconds, much less than it takes to pass work to a thread, to wait for it, and to get the
interpreter back. Others take milliseconds, and only their own streams should wait for those.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from onward.grammar.matcher import TokenBitmask

INLINE_LIMIT_S = 0.0003
"""A mask that is expected to take longer is computed in another thread."""
MAX_INLINE_BUDGET_S = 0.01
"""The inline budget of all slots together, if no mask was computed inline for a while."""
INLINE_BUDGET_SHARE = 0.5
"""Inline time in the long run, as a share of all other time. It bounds the delay of other slots by masks that take
longer than expected."""


@dataclass(frozen=True, slots=True)
class CompletedMask:
    """A computed mask, or the error that its computation raised."""

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
        """Computes a mask, now or in another thread. `expected_s` is how long `compute` is expected to take."""
        ...


class ThreadedMaskExecutor:
    """Used by one thread. It starts no other thread before the first mask that needs one."""

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
    except Exception as fault:  # raised again in `CompletedMask.result`
        return CompletedMask(None, fault)


def wait_for_one(masks: Sequence[NextMask], limit_s: float) -> None:
    wait(_pending(masks), limit_s, FIRST_COMPLETED)


def wait_for_all(masks: Sequence[NextMask], limit_s: float | None = None) -> None:
    wait(_pending(masks), limit_s)


def _pending(masks: Sequence[NextMask]) -> list[Future[TokenBitmask]]:
    return [mask for mask in masks if not isinstance(mask, CompletedMask)]
