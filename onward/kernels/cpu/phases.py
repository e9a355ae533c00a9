"""How threads share a step: phases of independent items, drawn by whoever is free.

A phase is over when all its items are done, not when all threads have come by: a thread that the system has put aside
holds up the others only if it holds an item. So the order of phases is kept, and who did what never shows in a result.

`work` is int64 [phases, 16], zeroed before a step: the next item at 0, the finished ones at 8, a cache line apart.
"""

from onward.kernels.cpu.atomics import fetch_add, load_acquire, nap, pause
from onward.kernels.cpu.jit import device, inlined

WORDS_PER_PHASE = 16
_SPINS_BEFORE_NAP = 4000


@inlined
def draw(work, phase, count):
    """The first of the next `count` items. It may lie beyond the last item: then there is nothing left to do."""
    return fetch_add(work, phase * WORDS_PER_PHASE, count)


@inlined
def finish(work, phase, count):
    """What these items wrote is visible to all who find the phase complete."""
    fetch_add(work, phase * WORDS_PER_PHASE + 8, count)


@device
def await_all(work, phase, total):
    """Returns when all `total` items of the phase are done, by whomever."""
    spins = 0
    while load_acquire(work, phase * WORDS_PER_PHASE + 8) < total:
        spins += 1
        if spins < _SPINS_BEFORE_NAP:
            pause()
        else:
            nap()
