"""What each kind of death of a worker means for its KV memory, which the supervisor owns. Does no I/O.

Memory is kept only where the worker certainly wrote nothing but what its steps were to write: it was ended from outside,
in the middle of a correct step. A fault of its own may have damaged any block, and nothing would show it.

The reason decides, not the exit status: a worker that the supervisor has killed for its silence ends with the same signal
as one that the kernel has killed for lack of memory.
"""

import signal
from enum import Enum


class KillReason(Enum):
    """Why the supervisor has killed a process."""

    SILENCE = "silence"
    """It owed an answer, a step, or the end of its start: it may be doing anything."""
    REPLACEMENT = "replacement"
    """Its engine wants other memory: a peer may still write to this one."""
    DEMO = "demo"
    SHUTDOWN = "shutdown"


class WorkerDeath(Enum):
    KILLED_FROM_OUTSIDE = "killed from outside"
    """SIGKILL, by the kernel for lack of memory or by hand."""
    KILLED_FOR_DEMO = "killed for a demonstration"
    ENGINE_DIED = "its engine died"
    """The supervisor has ended it, since its steps have no owner any more."""
    SILENT = "silent"
    REPLACED = "replaced"
    CRASHED = "crashed"
    """By a signal of its own, such as SIGSEGV, or one that nobody sends."""
    EXITED = "exited"
    """An exception, or a start that failed."""


_KEEPS_MEMORY = {
    WorkerDeath.KILLED_FROM_OUTSIDE: True,
    WorkerDeath.KILLED_FOR_DEMO: True,
    WorkerDeath.ENGINE_DIED: True,
    WorkerDeath.SILENT: False,
    WorkerDeath.REPLACED: False,
    WorkerDeath.CRASHED: False,
    WorkerDeath.EXITED: False,
}

_BY_KILL_REASON = {
    KillReason.SILENCE: WorkerDeath.SILENT,
    KillReason.REPLACEMENT: WorkerDeath.REPLACED,
    KillReason.DEMO: WorkerDeath.KILLED_FOR_DEMO,
    KillReason.SHUTDOWN: WorkerDeath.EXITED,
}


def keeps_memory(death: WorkerDeath) -> bool:
    """Whether the next worker gets the KV memory of one that has died in this way."""
    return _KEEPS_MEMORY[death]


def classify_death(return_code: int, kill_reason: KillReason | None, *, has_engine: bool) -> WorkerDeath:
    """`return_code`: as `subprocess` has it, negative for a signal. `kill_reason`: if the supervisor has killed it.
    `has_engine`: False if its engine has died before."""
    if return_code >= 0:
        return WorkerDeath.EXITED
    if return_code != -signal.SIGKILL:
        return WorkerDeath.CRASHED
    if kill_reason is not None:
        return _BY_KILL_REASON[kill_reason]
    return WorkerDeath.KILLED_FROM_OUTSIDE if has_engine else WorkerDeath.ENGINE_DIED
