"""How threads share a step: phases of independent items, drawn by whoever is free.

A phase is over when all its items are done, not when all threads have come by: a thread that the system has put aside
holds up the others only if it holds an item. So the order of phases is kept, and who did what never shows in a result.

Items may be divided into as many lots as there are threads. A thread draws from its own lot first, then from the others':
so rows mostly stay with the core that computed them before, and nobody idles.

`work` is int64 [phases, 16], zeroed before a step: each lot's next item at 0 to 7; the finished ones at 8, on a cache line
of their own; beside them, when a phase is over, its time stamp, for those who want to know where a step's time goes.
"""

from onward.kernels.cpu.atomics import fetch_add, load_acquire, pause, read_cycle_counter, short_sleep
from onward.kernels.cpu.jit import inlined_kernel_function, kernel_function

WORDS_PER_PHASE = 16
MAX_PARTITIONS = 8
END_STAMP = 9
_SPINS_BEFORE_NAP = 4000


@inlined_kernel_function
def claim_items(work, phase, lot, count):
    """The first of the next `count` items of a lot. It may lie beyond the last one: then nothing is left to do."""
    return fetch_add(work, phase * WORDS_PER_PHASE + lot, count)


@inlined_kernel_function
def partition_start(total, lot, num_lots):
    """Where a lot begins, when `total` items are divided evenly."""
    return total * lot // num_lots


@inlined_kernel_function
def mark_finished(work, phase, count):
    """What these items wrote is visible to all who find the phase complete."""
    fetch_add(work, phase * WORDS_PER_PHASE + 8, count)


@kernel_function
def wait_for_phase(work, phase, total):
    """Returns when all `total` items of the phase are done, by whomever."""
    spins = 0
    while load_acquire(work, phase * WORDS_PER_PHASE + 8) < total:
        spins += 1
        if spins < _SPINS_BEFORE_NAP:
            pause()
        else:
            short_sleep()
    work[phase * WORDS_PER_PHASE + END_STAMP] = read_cycle_counter()
