"""F20 to F37: KV transfer between a decode instance and the prefill instances that compute prompts for it."""

from onward.sim.catalogue_entry import START_S, CatalogueEntry, burst, catalogue, entry, on_message
from onward.sim.scenario import FaultSpec, SimInstanceSpec, SimRequest
from onward.sim.vocabulary import DOOM

TESTS = "tests/failures/test_kv_between_machines.py::"
LONG = "a decade of dead beef in the sea "
P0 = SimInstanceSpec("p0", "prefill", num_blocks=64, max_num_batched_tokens=16)
P1 = SimInstanceSpec("p1", "prefill", num_blocks=64, max_num_batched_tokens=16)
D0 = SimInstanceSpec("d0", "decode", num_blocks=64, max_num_batched_tokens=16)
TIGHT = SimInstanceSpec("d0", "decode", num_blocks=18, max_num_seqs=4, max_num_batched_tokens=16)
"""Has blocks for one long prompt and its output, and not for two."""

KV: dict[str, CatalogueEntry] = catalogue(
    entry(
        "F20",
        "an abort frees blocks that a late write still reaches",
        TESTS + "test_f20_blocks_that_a_late_write_may_reach_are_nobody_s_until_the_writer_is_quiet",
        [TIGHT, P0],
        [
            SimRequest("gone", START_S, prompt=LONG, max_tokens=20, abort_at_s=0.5),
            *burst(4, "face ", at_s=START_S + 0.6, max_tokens=12),
        ],
        [
            on_message("LeaseGrant", "slow-kv", "p0", duration_s=0.45),
            on_message("LeaseGrant", "stop-worker", "p0", at_s=0.1, duration_s=2.5),
        ],
        expects=("gone ends: aborted",),
    ),
    entry(
        "F21",
        "a slow transfer's blocks are freed by time",
        TESTS + "test_f21_a_slow_prefill_keeps_its_lease_and_its_blocks_as_long_as_it_lives",
        [D0, P0],
        burst(3, LONG),
        [on_message("LeaseGrant", "slow-kv", "p0", duration_s=7.0)],
        forbids=("CancelHandoff",),
    ),
    entry(
        "F22",
        "a request ends at the decode side, and the prefill side is not informed",
        TESTS + "test_f22_a_request_that_ends_at_the_decode_side_ends_at_the_prefill_side",
        [TIGHT, P0],
        [
            SimRequest(f"q{index}", START_S, prompt=f"{LONG}{index}", max_tokens=16, abort_at_s=0.1 + index / 8)
            for index in range(6)
        ],
        [FaultSpec("delay", "peers", START_S, duration_s=0.5, rate=0.3)],
        expects=("CancelHandoff",),
    ),
    entry(
        "F23",
        "a push fails without a report",
        TESTS + "test_f23_a_push_that_fails_is_told_and_the_prompt_is_computed_elsewhere",
        [D0, P0],
        burst(3, LONG),
        [on_message("LeaseGrant", "break-kv", "p0", duration_s=0.6, rate=0.3)],
        expects=("p0/engine.2>d0/engine.2 peers  CancelHandoff",),
    ),
    entry(
        "F24",
        "blocks are refused, and the prefill side is not told",
        TESTS + "test_f24_a_refusal_of_blocks_reaches_the_prefill_side",
        [TIGHT, P0],
        burst(4, LONG, max_tokens=30),
        [FaultSpec("repeat", "peers", START_S, duration_s=3.0)],
        expects=("RefuseHandoff",),
    ),
    entry(
        "F25",
        "the same full decode instance is asked for ever, and everything behind it waits",
        TESTS + "test_f25_a_decode_instance_that_does_not_answer_holds_up_nobody_else",
        [TIGHT, SimInstanceSpec("d1", "decode", num_blocks=64, max_num_batched_tokens=16), P0],
        burst(8, LONG, at_s=START_S + 1, max_tokens=24),
        [on_message("PrefillOffer", "stop-engine", "d0", nth=2, duration_s=2.5)],
        expects=("stop-engine d0",),
        num_routers=1,
        policy="round_robin",
    ),
    entry(
        "F26",
        "the same ask, sent twice, takes blocks twice",
        TESTS + "test_f26_the_same_offer_twice_takes_blocks_once",
        [D0, P0],
        burst(4, LONG),
        [FaultSpec("repeat", "peers", START_S, duration_s=4.0)],
        expects=("LeaseGrant",),
    ),
    entry(
        "F27",
        "what a worker says for a slot that is only granted crashes the stage",
        TESTS + "test_f27_what_a_worker_says_for_a_granted_slot_is_stale",
        [SimInstanceSpec("d0", "decode", num_blocks=64, max_num_seqs=2, max_num_batched_tokens=16), P0],
        burst(6, LONG, max_tokens=6),
        [
            FaultSpec("delay", "d0/worker", START_S, duration_s=4.0, rate=0.3),
            FaultSpec("slow-kv", "p0", START_S, duration_s=3.0, rate=0.5),
        ],
        expects=("LeaseGrant",),
    ),
    entry(
        "F28",
        "leased blocks are not counted, and the instance looks free",
        TESTS + "test_f28_leased_blocks_are_counted_and_not_given_twice",
        [
            SimInstanceSpec(
                "d0", "decode", num_blocks=22, max_num_seqs=8, max_num_batched_tokens=16, local_prefill_tokens=12
            ),
            P0,
        ],
        [
            *burst(3, LONG, max_tokens=12),
            *(SimRequest(f"s{index}", START_S + 0.3, prompt="fade", max_tokens=20) for index in range(6)),
        ],
        [on_message("LeaseGrant", "slow-kv", "p0", duration_s=3.0)],
        expects=("LeaseGrant",),
    ),
    entry(
        "F29",
        "a restarted prefill peer is taken for the old one",
        TESTS + "test_f29_a_peer_with_a_new_incarnation_is_a_new_peer",
        [D0, P0],
        burst(8, LONG, gap_s=0.8),
        [
            FaultSpec("delay", ">d0/engine", START_S, duration_s=6.0, rate=0.3),
            on_message("PrefillOffer", "kill-worker", "p0", nth=2, at_s=0.01),
            on_message("PrefillOffer", "kill-engine", "p0", nth=5, at_s=0.01),
        ],
        expects=("PeerGone",),
    ),
    entry(
        "F30",
        "several loads hold blocks, and none of them can finish",
        TESTS + "test_f30_a_lease_holds_all_that_its_request_needs_to_arrive",
        [SimInstanceSpec("d0", "decode", num_blocks=24, max_num_seqs=8, max_num_batched_tokens=16), P0, P1],
        burst(8, LONG, gap_s=0.0, max_tokens=12),
        [on_message("LeaseGrant", "slow-kv", "", duration_s=2.0, rate=0.9)],
        expects=("LeaseGrant",),
    ),
    entry(
        "F31",
        "a send to a dead peer blocks the loop: simulated sends never block, only real sockets can",
        TESTS + "test_f31_sending_to_a_peer_that_does_not_read_never_blocks",
    ),
    entry(
        "F32",
        "a timeout is enforced before what has arrived is read",
        TESTS + "test_f32_a_word_that_arrives_with_its_deadline_counts",
        [D0, P0],
        burst(3, LONG),
        [on_message("LeaseGrant", "stop-engine", "d0", at_s=0.01, duration_s=2.5)],
        expects=("stop-engine d0",),
    ),
    entry(
        "F33",
        "a prompt is rejected or half sent, and the decode side runs on it",
        TESTS + "test_f33_nothing_runs_before_every_block_is_counted_and_equal",
        [D0, P0],
        [*burst(3, LONG), SimRequest("doomed", START_S, prompt=f"{LONG}{DOOM}", max_tokens=8)],
        [
            on_message("LeaseGrant", "slow-kv", "p0", duration_s=0.5),
            on_message("LeaseGrant", "kill-worker", "p0", nth=2, at_s=0.3),
        ],
        expects=("doomed ends: invalid_logits",),
    ),
    entry(
        "F34",
        "all first tokens queue behind one transfer that is waited for",
        TESTS + "test_f34_a_slow_transfer_holds_up_no_other_prompt",
        [D0, P0],
        burst(6, LONG, gap_s=0.1),
        [on_message("LeaseGrant", "slow-kv", "p0", duration_s=5.0, rate=0.97)],
    ),
    entry(
        "F35",
        "success is counted before it is known: a figure for people, which no client of a simulation sees",
        TESTS + "test_f35_success_is_counted_when_the_peer_has_taken_it",
    ),
    entry(
        "F36",
        "a lost last message holds blocks for minutes",
        TESTS + "test_f36_a_lost_message_costs_a_moment_and_holds_nothing",
        [D0, P0],
        burst(4, LONG, gap_s=0.3),
        [
            on_message("LeaseGrant", "lose", "peers PrefillTaken", duration_s=4.0),
            on_message("LeaseGrant", "lose", "peers PrefillDone", duration_s=0.4),
        ],
        expects=("PrefillTaken  lost", "PrefillDone  lost"),
    ),
    entry(
        "F37",
        "a dead prefill peer makes the decode instance look ill, and it is killed",
        TESTS + "test_f37_a_dead_prefill_peer_is_not_the_decode_instance_s_illness",
        [D0, P0],
        burst(6, LONG, gap_s=0.3),
        [on_message("LeaseGrant", "kill-instance", "p0", nth=2, at_s=0.01, duration_s=20.0)],
        expects=("kill-instance p0",),
        forbids=("is killed for silence", "is renewed"),
    ),
)
