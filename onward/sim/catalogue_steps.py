"""F01 to F18: steps in flight and preemption. One instance, often with a pool so small that requests preempt each
other."""

from onward.sim.catalogue_entry import START_S, CatalogueEntry, burst, catalogue, entry, on_message
from onward.sim.scenario import FaultSpec, SimInstanceSpec, SimRequest
from onward.sim.vocabulary import DOOM

TESTS = "tests/failures/test_steps_and_preemption.py::"
PREEMPTED = ("m0 preempts",)
TIGHT = SimInstanceSpec("m0", num_blocks=12, max_num_seqs=4, max_num_batched_tokens=16)
"""Has blocks for one and a half of the requests of `burst`."""
ROOMY = SimInstanceSpec("m0", num_blocks=64, max_num_seqs=4, max_num_batched_tokens=16)

STEPS: dict[str, CatalogueEntry] = catalogue(
    entry(
        "F01",
        "a stale value is taken for the reply to a preempt",
        TESTS + "test_f01_each_value_has_one_meaning_and_a_reply_names_its_epoch",
        [TIGHT],
        burst(8, "dead beef ", stop=["e", "ab"]),
        [on_message("StepPlan", "delay", "m0/worker", nth=8, duration_s=4.0, rate=0.3)],
        expects=PREEMPTED,
    ),
    entry(
        "F02",
        "a step of nothing but preempted requests is not answered",
        TESTS + "test_f02_a_plan_of_nothing_but_preempts_has_a_result",
        [SimInstanceSpec("m0", num_blocks=12, max_num_seqs=1, max_num_batched_tokens=16)],
        [
            SimRequest("low", START_S, prompt="dead beef", max_tokens=24, ignore_eos=True, priority=3),
            SimRequest("high", START_S + 0.4, prompt="café", max_tokens=8, ignore_eos=True, priority=-1),
        ],
        expects=("m0 preempts 1", "and runs nothing"),
    ),
    entry(
        "F03",
        "a slot that is missing from a result counts as its reply",
        TESTS + "test_f03_a_slot_that_is_missing_from_a_result_has_said_nothing",
        [TIGHT],
        [*burst(4, "dead beef "), SimRequest("doomed", START_S + 0.2, prompt=f"face{DOOM}", max_tokens=8)],
        expects=(*PREEMPTED, "doomed ends: invalid_logits"),
    ),
    entry(
        "F04",
        "the end of an output and the reply to its preempt cross",
        TESTS + "test_f04_a_request_that_finished_is_not_requeued_by_the_reply_that_crossed_its_end",
        [TIGHT],
        [
            SimRequest(f"q{index}", START_S + index / 50, prompt="dead beef", max_tokens=9 + index, ignore_eos=True)
            for index in range(12)
        ],
        expects=PREEMPTED,
    ),
    entry(
        "F05",
        "token id 0 is dropped",
        TESTS + "test_f05_token_zero_is_a_token_everywhere",
        [ROOMY],
        burst(3, "cab ", max_tokens=60),
        [on_message("StepResult", "kill-worker", "m0", nth=20)],
    ),
    entry(
        "F06",
        "a resumed request comes back without its output, or with the list cut to the chunk",
        TESTS + "test_f06_a_resumed_request_comes_back_with_its_whole_list",
        [SimInstanceSpec("m0", num_blocks=12, max_num_seqs=4, max_num_batched_tokens=8)],
        burst(4, "dead beef "),
        [
            on_message("StepResult", "kill-worker", "m0", nth=30),
            on_message("StepResult", "kill-engine", "m0", nth=60),
        ],
        expects=PREEMPTED,
    ),
    entry(
        "F07",
        "a step in flight at the preemption changes counters that were reset",
        TESTS + "test_f07_a_step_that_was_in_flight_at_the_preemption_changes_only_the_list",
        [TIGHT],
        burst(8, "dead beef ", stop=["c", "\n"]),
        [on_message("StepPlan", "delay", "m0/engine", nth=12, duration_s=3.0, rate=0.3)],
        expects=PREEMPTED,
    ),
    entry(
        "F08",
        "freed blocks are refilled while the last step still writes them",
        TESTS + "test_f08_blocks_are_not_reused_while_a_step_in_flight_may_write_them",
        [TIGHT],
        [
            SimRequest(
                f"q{index}",
                START_S + index / 20,
                prompt="dead beef",
                max_tokens=24,
                ignore_eos=True,
                abort_at_s=0.3 if index % 2 else None,
            )
            for index in range(8)
        ],
        [FaultSpec("delay", "m0/worker", START_S + 0.3, duration_s=2.0, rate=0.3)],
    ),
    entry(
        "F09",
        "all requests are preempted for blocks that are only fenced",
        TESTS + "test_f09_blocks_that_are_only_fenced_are_waited_for",
        [SimInstanceSpec("m0", num_blocks=16, max_num_seqs=8, max_num_batched_tokens=16)],
        burst(10, "dead beef "),
        [on_message("StepPlan", "delay", "m0/worker", nth=10, duration_s=2.0, rate=0.5)],
        expects=PREEMPTED,
    ),
    entry(
        "F10",
        "two requests look as if they shared a prefix",
        TESTS + "test_f10_two_requests_share_a_block_by_its_hash_and_in_no_other_way",
        [SimInstanceSpec("m0", num_blocks=16, max_num_seqs=4, max_num_batched_tokens=16)],
        [
            SimRequest(
                f"q{index}",
                START_S + index / 25,
                prompt=f"the same long beginning {index % 3}",
                max_tokens=12,
                ignore_eos=True,
                abort_at_s=0.2 if index % 4 == 1 else None,
            )
            for index in range(12)
        ],
    ),
    entry(
        "F11",
        "tokens come twice, or before those in front of them",
        TESTS + "test_f11_a_token_is_taken_at_its_position_once",
        [ROOMY],
        burst(4, "face "),
        [
            on_message("TokenDeltas", "repeat", "m0/engine", duration_s=1.0, rate=0.5),
            on_message("TokenDeltas", "lose", ">m0/api", nth=8, duration_s=0.3, rate=0.5),
        ],
    ),
    entry(
        "F12",
        "a slot has a new tenant while a surplus step of the last one is in flight",
        TESTS + "test_f12_a_slot_has_no_new_tenant_while_a_surplus_step_of_the_last_one_is_in_flight",
        [SimInstanceSpec("m0", num_blocks=64, max_num_seqs=2, max_num_batched_tokens=16)],
        [SimRequest(f"q{index}", START_S, prompt="fade", max_tokens=3 + index % 4) for index in range(12)],
        [FaultSpec("delay", "m0/worker", START_S, duration_s=2.0, rate=0.2)],
    ),
    entry(
        "F13",
        "what was preempted in its prefill is cached as if it were computed",
        TESTS + "test_f13_only_what_was_computed_is_cached",
        [SimInstanceSpec("m0", num_blocks=18, max_num_seqs=4, max_num_batched_tokens=8)],
        [
            *burst(4, "dead beef ", max_tokens=12),
            SimRequest("long", START_S + 0.1, prompt="a decade of dead beef in the sea", max_tokens=8, priority=3),
            SimRequest("high", START_S + 0.3, prompt="dead beef face", max_tokens=20, ignore_eos=True, priority=-1),
            SimRequest("again", START_S + 1.5, prompt="a decade of dead beef in the sea", max_tokens=8),
        ],
        expects=PREEMPTED,
    ),
    entry(
        "F14",
        "an abort waits for a request that is waiting itself",
        TESTS + "test_f14_an_abort_is_answered_in_every_state_and_twice",
        [TIGHT],
        [
            SimRequest(
                f"q{index}",
                START_S + index / 50,
                prompt="dead beef",
                max_tokens=24,
                ignore_eos=True,
                priority=index % 2,
                abort_at_s=0.05 + index / 10 if index else None,
            )
            for index in range(8)
        ],
        [FaultSpec("stop-engine", "m0", START_S + 0.5, duration_s=1.0)],
        expects=("ends: aborted",),
    ),
    entry(
        "F15",
        "the beginning of an id aborts every request that begins so",
        TESTS + "test_f15_a_name_matches_itself_and_nothing_else",
        [ROOMY],
        [
            SimRequest(
                name,
                START_S,
                prompt=f"face {name}",
                max_tokens=40,
                ignore_eos=True,
                abort_at_s=0.4 if name == "q" else None,
            )
            for name in ("q", "q1", "q10", "q11")
        ],
        expects=("q ends: aborted",),
    ),
    entry(
        "F16",
        "one exception in one slot loses the whole step for all",
        TESTS + "test_f16_an_exception_in_one_slot_costs_the_others_nothing",
        [ROOMY],
        [*burst(3, "cab "), SimRequest("doomed", START_S + 0.1, prompt=f"dead{DOOM}", max_tokens=8)],
        expects=("doomed ends: invalid_logits",),
    ),
    entry(
        "F17",
        "requests near the slot limit are admitted without a slot",
        TESTS + "test_f17_nobody_is_admitted_without_a_slot",
        [SimInstanceSpec("m0", num_blocks=64, max_num_seqs=2, max_num_batched_tokens=64)],
        burst(12, "bee ", gap_s=0.0, max_tokens=10),
        [on_message("StepResult", "kill-worker", "m0", nth=9)],
    ),
    entry(
        "F18",
        "a buffer is reused while it is still being sent: simulated wires copy, only the real ring can do this",
        TESTS + "test_f18_a_result_that_was_taken_is_not_overwritten_by_later_steps",
    ),
)
