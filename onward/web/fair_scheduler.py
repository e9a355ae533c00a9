"""Decides which caller's work runs next when callers share a few threads or processes. Takes times and names, and runs
nothing.

Each caller is charged the seconds that its work took, whether it succeeded or was refused. Of the callers with work
that may start, the one that was charged least is next (start-time fair queueing). So a caller with much or slow work
waits for its own work, and another one waits for at most the work that runs already. A caller that comes back after a
pause starts level with the others: idle time is not saved up.

A caller is only a name here; this module knows nothing of API keys.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

LEAST_CHARGE_S = 1e-4
"""Smallest charge of any work, so that callers with work that takes no time take turns."""
MANY_ACCOUNTS = 256
"""With this many accounts, `add` first removes the ones that are not needed any more."""


@dataclass(frozen=True, slots=True)
class FairSchedulerLimits:
    running: int
    """Limit for all callers together."""
    running_per_caller: int
    """Less than `running`, so that one caller alone cannot occupy all."""
    waiting: int
    waiting_per_caller: int
    bytes_per_caller: int | None = None
    """Bytes of the bodies that a caller's work holds, waiting or running. A single body may have any size."""
    refused_work_s: float | None = None
    """Seconds of work that ends in a refusal that a caller may cause at once; as much again becomes available each
    minute."""


@dataclass(slots=True)
class _CallerAccount(Generic[T]):
    charged_s: float
    waiting: "deque[T]" = field(default_factory=deque)
    num_running: int = 0
    num_bytes: int = 0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.num_running


class FairScheduler(Generic[T]):
    def __init__(self, limits: FairSchedulerLimits) -> None:
        self._limits = limits
        self._accounts: dict[str, _CallerAccount[T]] = {}
        self._num_waiting = self._num_running = 0
        self._virtual_time_s = 0.0
        """The charge of the caller that started work last, when it did. It does not decrease while there is work."""

    def __len__(self) -> int:
        """Returns the number of callers with an account."""
        return len(self._accounts)

    def is_full(self, caller: str, num_bytes: int = 0) -> bool:
        """Returns whether further work of this caller has to be refused now."""
        limits, account = self._limits, self._accounts.get(caller)
        if self._num_waiting >= limits.waiting:
            return True
        if account is None or account.is_idle:
            return False
        too_large = limits.bytes_per_caller is not None and account.num_bytes + num_bytes > limits.bytes_per_caller
        return too_large or len(account.waiting) >= limits.waiting_per_caller

    def add(self, caller: str, work: T, num_bytes: int = 0) -> None:
        if len(self._accounts) >= MANY_ACCOUNTS:
            self._forget_idle()
        account = self._accounts.setdefault(caller, _CallerAccount(self._virtual_time_s))
        if account.is_idle:
            account.charged_s = max(account.charged_s, self._virtual_time_s)
        account.waiting.append(work)
        account.num_bytes += num_bytes
        self._num_waiting += 1

    def start_next(self) -> T | None:
        """Returns the work that is to start now, if any."""
        if self._num_running >= self._limits.running:
            return None
        max_per_caller = self._limits.running_per_caller
        ready = [
            candidate
            for candidate in self._accounts.values()
            if candidate.waiting and candidate.num_running < max_per_caller
        ]
        if not ready:
            return None
        account = min(ready, key=lambda candidate: (candidate.charged_s, candidate.num_running))
        account.num_running += 1
        self._num_running += 1
        self._num_waiting -= 1
        self._virtual_time_s = max(self._virtual_time_s, account.charged_s)
        return account.waiting.popleft()

    def cancel(self, caller: str, work: T, num_bytes: int = 0) -> bool:
        """Removes work that is not needed any more. Returns False if it does not wait, because it has started."""
        account = self._accounts.get(caller)
        if account is None or work not in account.waiting:
            return False
        account.waiting.remove(work)
        self._num_waiting -= 1
        self._give_back(caller, account, num_bytes)
        return True

    def finish(self, caller: str, took_s: float, num_bytes: int = 0) -> None:
        account = self._accounts[caller]
        account.num_running -= 1
        self._num_running -= 1
        account.charged_s += max(took_s, LEAST_CHARGE_S)
        self._give_back(caller, account, num_bytes)

    def _give_back(self, caller: str, account: _CallerAccount[T], num_bytes: int) -> None:
        account.num_bytes -= num_bytes
        if not self._num_running and not self._num_waiting:
            # Without any work, no caller is ahead of another.
            self._accounts.clear()
            self._virtual_time_s = 0.0
        elif account.is_idle and account.charged_s <= self._virtual_time_s:
            del self._accounts[caller]

    def _forget_idle(self) -> None:
        """Removes idle accounts that a new account would equal, since that begins with the current virtual time."""
        virtual_time_s, accounts = self._virtual_time_s, self._accounts
        self._accounts = {
            name: account
            for name, account in accounts.items()
            if not (account.is_idle and account.charged_s <= virtual_time_s)
        }


class RefusedWorkBudget:
    """The seconds of refused work that each caller has used of `FairSchedulerLimits.refused_work_s`, and how long it
    must wait if that is exceeded. Used seconds decrease by this allowance each minute."""

    def __init__(self, allowed_s: float) -> None:
        self._allowed_s = allowed_s
        self._used: dict[str, tuple[float, float]] = {}
        """Used seconds, and when they were counted. They decrease by `allowed_s` each minute."""

    def wait_s(self, caller: str, now_s: float) -> float:
        """Returns how long this caller has to wait until it may cause a refusal again."""
        excess_s = self._used_s(caller, now_s) - self._allowed_s
        return max(0.0, excess_s) * 60 / self._allowed_s

    def charge(self, caller: str, took_s: float, now_s: float) -> None:
        self._used[caller] = self._used_s(caller, now_s) + took_s, now_s
        for name in [name for name in self._used if not self._used_s(name, now_s)]:
            del self._used[name]

    def _used_s(self, caller: str, now_s: float) -> float:
        used_s, updated_at_s = self._used.get(caller, (0.0, now_s))
        return max(0.0, used_s - (now_s - updated_at_s) * self._allowed_s / 60)
