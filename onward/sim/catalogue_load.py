"""Scenarios of load: long queues, small pools, wrong clocks, engines that die repeatedly.

Few seeds reach these states. For example, a suspect must have two crash charges, be large, and meet a load that lasts
long enough.
"""

from onward.sim.catalogue_entry import ROUTED_START_S, START_S, CatalogueEntry, burst, catalogue, entry, on_message
from onward.sim.scenario import FaultSpec, SimInstanceSpec, SimRequest
from onward.sim.vocabulary import ENGINE_POISON

TIGHT = SimInstanceSpec("m0", num_blocks=16, max_num_seqs=4, max_num_batched_tokens=16, max_queue=256)
BUSY = SimInstanceSpec("m0", num_blocks=200, max_num_seqs=2, step_s=0.06, max_queue=256)
LONG = "a decade of dead beef in the sea, a cab and a bee"
"""A prompt that needs most of the blocks of `TIGHT`, and several steps to compute."""


def steady(count: int, every_s: float, first_s: float, prompt: str = "the sea") -> list[SimRequest]:
    """Returns short requests that arrive faster than they are served."""
    return burst(count, prompt, at_s=first_s, gap_s=every_s, max_tokens=8)


LOAD: dict[str, CatalogueEntry] = catalogue(
    entry(
        "wrong-clock",
        "a router's wall clock, half a minute late, puts its requests before those of another router",
        "tests/engine/test_arrival.py::test_credit_for_waiting_is_bounded",
        [BUSY],
        steady(40, 0.1, ROUTED_START_S),
        [FaultSpec("clock", "r1", 0.5, duration_s=60.0, rate=0.0)],
        num_routers=2,
    ),
    entry(
        "suspect-under-load",
        "a suspect that waits for room is passed by later requests, as long as the load lasts",
        "tests/engine/test_suspects.py::test_a_suspect_that_waits_for_room_is_not_passed_by_later_requests",
        [TIGHT],
        [
            SimRequest("large", START_S, prompt=LONG, max_tokens=8, ignore_eos=True),
            # They arrive while there is no worker, hold the blocks when the suspect could run, and end one by one.
            *(
                SimRequest(
                    f"urgent{i}", START_S + 0.6, prompt="face", max_tokens=8 + 4 * i, ignore_eos=True, priority=-1
                )
                for i in range(4)
            ),
            *steady(60, 0.04, START_S + 1.2, "bee"),
        ],
        [
            on_message("StepPlan", "kill-worker", "m0", nth=2, wire="worker"),
            on_message("StepPlan", "kill-worker", "m0", nth=4, wire="worker"),
        ],
        expects=("kill-worker m0",),
    ),
    entry(
        "preemption-in-vain",
        "requests are preempted for one that has not enough room without them either",
        "tests/engine/test_victims.py::test_nobody_is_preempted_if_all_victims_together_do_not_make_enough_room",
        [TIGHT],
        [
            SimRequest("equal", START_S, prompt="dead beef in the sea", max_tokens=8, ignore_eos=True),
            SimRequest("low", START_S, prompt="face", max_tokens=20, ignore_eos=True, priority=3),
            SimRequest("high", START_S + 0.1, prompt=LONG, max_tokens=3, ignore_eos=True),
        ],
    ),
    entry(
        "engine-deaths",
        "a request under which every engine dies is tried again for ever",
        "tests/api/test_engine_deaths.py::"
        "test_a_request_that_kills_every_engine_is_refused_after_four_and_all_others_complete",
        [BUSY],
        [
            *burst(4, "bee "),
            SimRequest("killer", START_S + 0.2, prompt=f"face{ENGINE_POISON}", max_tokens=8),
        ],
        expects=("killer ends: crashed_engine",),
    ),
    entry(
        "hung-worker",
        "a worker that hangs for ever stops every stream of its instance",
        "tests/supervisor/test_core.py::test_a_worker_is_killed_for_its_own_stall_and_not_for_that_of_the_one_before",
        [BUSY],
        burst(4, "bee ", max_tokens=24),
        [FaultSpec("stop-worker", "m0", START_S + 0.3, duration_s=900.0)],
        expects=("stop-worker m0",),
    ),
)
