"""How threads share a step: phases of independent items, which free threads claim.

A phase ends when all its items are finished, not when all threads have passed it: a thread that the system has
suspended delays the others only if it holds an item. So phases keep their order, and no result depends on which thread
computed which item.

Items may be divided into as many partitions (`lot`) as there are threads, up to `MAX_PARTITIONS`. A thread claims from
its own partition first, then from the others. So rows mostly stay with the core that computed them before, and no
thread is idle.

`work` is int64 [phases, 16], zeroed before a step. Words 0 to 7 of a phase are the next item of each partition. Word 8
is the number of finished items, on a cache line of its own. Word 9 is the time stamp of the phase's end, for
measurements.
"""

from onward.kernels.cpu.atomics import fetch_add, load_acquire, pause, read_cycle_counter, short_sleep
from onward.kernels.cpu.jit import inlined_kernel_function, kernel_function

WORDS_PER_PHASE = 16
MAX_PARTITIONS = 8
END_STAMP = 9
_SPINS_BEFORE_NAP = 4000


@inlined_kernel_function
def claim_items(work, phase, lot, count):
    """Claims the next `count` items of a partition and returns the first of them. If it lies beyond the last item,
    nothing is left to do."""
    return fetch_add(work, phase * WORDS_PER_PHASE + lot, count)


@inlined_kernel_function
def partition_start(total, lot, num_lots):
    """Returns the first item of a partition when `total` items are divided evenly."""
    return total * lot // num_lots


@inlined_kernel_function
def mark_finished(work, phase, count):
    """Marks `count` items as finished. Their results are visible to each thread that finds the phase complete."""
    fetch_add(work, phase * WORDS_PER_PHASE + 8, count)


@kernel_function
def wait_for_phase(work, phase, total):
    """Waits until all `total` items of the phase are finished, by any thread."""
    spins = 0
    while load_acquire(work, phase * WORDS_PER_PHASE + 8) < total:
        spins += 1
        if spins < _SPINS_BEFORE_NAP:
            pause()
        else:
            short_sleep()
    work[phase * WORDS_PER_PHASE + END_STAMP] = read_cycle_counter()
