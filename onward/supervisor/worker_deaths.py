"""Decides by the kind of a worker's death whether its KV memory, which the supervisor owns, is kept. Does no I/O.

Memory is kept only if the worker certainly wrote nothing but the KV of its steps: it was ended from outside, in the
middle of a correct step. A fault of its own may have damaged any block, and no check would find the damage.

The reason decides, not the exit status: a worker that the supervisor has killed for its silence ends with the same signal
as one that the kernel has killed for lack of memory.
"""

import signal
from collections.abc import Mapping
from enum import Enum


class KillReason(Enum):
    """Why the supervisor has killed a process."""

    SILENCE = "silence"
    """It did not answer, complete a step or complete its start in time. What it is doing is unknown."""
    STOPPED = "stopped"
    """A signal such as SIGSTOP had stopped it for too long."""
    REPLACEMENT = "replacement"
    """It has to be replaced by a worker with other memory, for example because a peer may still write to its own."""
    DEMO = "demo"
    SHUTDOWN = "shutdown"


class WorkerDeath(Enum):
    KILLED_FROM_OUTSIDE = "killed from outside"
    """SIGKILL, by the kernel for lack of memory or by hand."""
    KILLED_FOR_DEMO = "killed for a demonstration"
    ENGINE_DIED = "its engine died"
    """Ended by the supervisor, because the engine that its steps belonged to is dead."""
    STOPPED = "stopped"
    """Stopped by a signal in the middle of a correct step, and killed before it continued."""
    SILENT = "silent"
    REPLACED = "replaced"
    CRASHED = "crashed"
    """Ended by a signal other than SIGKILL, such as SIGSEGV."""
    EXITED = "exited"
    """Ended by an exception or by a failed start, or killed in a shutdown."""
    PEER_MAY_WRITE = "a peer may still write its memory"
    """Takes precedence over every other kind: a late write must not reach blocks that are handed out again."""


_KEEPS_MEMORY = {
    WorkerDeath.KILLED_FROM_OUTSIDE: True,
    WorkerDeath.KILLED_FOR_DEMO: True,
    WorkerDeath.ENGINE_DIED: True,
    WorkerDeath.STOPPED: True,
    WorkerDeath.SILENT: False,
    WorkerDeath.REPLACED: False,
    WorkerDeath.CRASHED: False,
    WorkerDeath.EXITED: False,
    WorkerDeath.PEER_MAY_WRITE: False,
}

_BY_KILL_REASON = {
    KillReason.STOPPED: WorkerDeath.STOPPED,
    KillReason.SILENCE: WorkerDeath.SILENT,
    KillReason.REPLACEMENT: WorkerDeath.REPLACED,
    KillReason.DEMO: WorkerDeath.KILLED_FOR_DEMO,
    KillReason.SHUTDOWN: WorkerDeath.EXITED,
}


def keeps_memory(death: WorkerDeath) -> bool:
    """Returns whether the next worker gets the KV memory of a worker that died in this way."""
    return _KEEPS_MEMORY[death]


def first_to_end(return_codes: Mapping[int, int]) -> int:
    """Returns the rank whose end explains that of its group. `return_codes` are those of the ranks that had ended before
    the others were killed, by rank. A fault takes precedence over SIGKILL, because it may have damaged the memory. An
    exit with 0 explains least: it is rank 0, which may have left because another rank was killed."""

    def precedence(rank: int) -> tuple[bool, bool, int]:
        code = return_codes[rank]
        return code in (0, -signal.SIGKILL), code == 0, rank

    return min(return_codes, key=precedence)


def classify_death(
    return_code: int, kill_reason: KillReason | None, *, has_engine: bool, peer_may_write: bool = False
) -> WorkerDeath:
    """Returns the kind of a worker's death.

    `return_code`: of `subprocess`, negative for a signal. `kill_reason`: set if the supervisor has killed it.
    `has_engine`: False if its engine has died before. `peer_may_write`: a peer has its memory mapped.
    """
    if peer_may_write:
        return WorkerDeath.PEER_MAY_WRITE
    if return_code >= 0:
        return WorkerDeath.EXITED
    if return_code != -signal.SIGKILL:
        return WorkerDeath.CRASHED
    if kill_reason is not None:
        return _BY_KILL_REASON[kill_reason]
    return WorkerDeath.KILLED_FROM_OUTSIDE if has_engine else WorkerDeath.ENGINE_DIED
