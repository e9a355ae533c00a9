"""F40 to F51: resumed streams. A router in front of one or more instances."""

from functools import partial

from onward.sim import catalogue_entry
from onward.sim.catalogue_entry import ROUTED_START_S, CatalogueEntry, burst, catalogue, on_message
from onward.sim.scenario import FaultSpec, SimInstanceSpec, SimRequest

TESTS = "tests/router/test_failures.py::"
ATTEMPTS = "tests/api/test_attempts.py::"
REPLICAS = "tests/router/test_replicas.py::"
M0, M1 = SimInstanceSpec("m0", step_s=0.03), SimInstanceSpec("m1", step_s=0.03)
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/generate")
BOTH_DIE = [
    FaultSpec("kill-instance", "m0", ROUTED_START_S + 0.7, duration_s=1.5),
    FaultSpec("kill-engine", "m1", ROUTED_START_S + 1.5),
]

VERSIONS = ("hash", "hash-v2")
SEVERAL_MODELS = "tests/router/test_several_models.py::"

entry = partial(catalogue_entry.entry, num_routers=1)

ROUTER: dict[str, CatalogueEntry] = catalogue(
    entry(
        "F40",
        "after a retry only the tail comes back, and after the last one an empty 200",
        TESTS + "test_f40_after_a_retry_the_whole_answer_comes_back_and_after_the_last_one_an_error",
        [M0, M1],
        [
            *burst(4, "the sea ", at_s=ROUTED_START_S, max_tokens=50),
            *(
                SimRequest(
                    f"whole{index}",
                    ROUTED_START_S,
                    prompt=f"face {index}",
                    is_streaming=False,
                    max_tokens=50,
                    seed=index,
                )
                for index in range(4)
            ),
        ],
        BOTH_DIE,
    ),
    entry(
        "F41",
        "only the first choice, only chat, only whole answers are retried",
        TESTS + "test_f41_all_choices_all_endpoints_and_both_modes_are_carried_on",
        [M0, M1],
        [
            SimRequest(
                f"q{index}",
                ROUTED_START_S,
                path=PATHS[index % 3],
                prompt=f"face {index}",
                is_streaming=index < 6,
                max_tokens=30,
                n=1 + index % 2 * 2,
                seed=index,
                temperature=1.0,
                ignore_eos=True,
            )
            for index in range(12)
        ],
        BOTH_DIE,
    ),
    entry(
        "F42",
        "a migrated request starts its grammar at the root: JSON within JSON",
        "tests/failures/test_grammars.py::test_f42_an_output_that_is_cut_anywhere_goes_on_as_if_it_had_not_been",
        [M0, M1],
        [
            SimRequest(
                f"q{index}",
                ROUTED_START_S + index / 10,
                prompt=f"cab {index}",
                max_tokens=60,
                temperature=1.0,
                seed=index,
                structure=("object", "json", "lark")[index % 3],
            )
            for index in range(12)
        ],
        BOTH_DIE,
    ),
    entry(
        "F43",
        "min_tokens, penalties and stop strings start over after a migration",
        ATTEMPTS + "test_f43_what_depends_on_the_tokens_so_far_goes_on_and_does_not_start_over",
        [M0, M1],
        [
            SimRequest(
                f"q{index}",
                ROUTED_START_S,
                prompt=f"cab {index}",
                max_tokens=40,
                min_tokens=20,
                presence_penalty=0.5,
                stop=["ab", " sea", "e"],
                wants_usage=True,
            )
            for index in range(8)
        ],
        BOTH_DIE,
    ),
    entry(
        "F44",
        "text is carried instead of ids, and characters break",
        ATTEMPTS + "test_f44_ids_are_carried_and_text_is_never_encoded_again",
        [M0, M1],
        burst(8, "日本🌊", at_s=ROUTED_START_S, max_tokens=60),
        BOTH_DIE,
    ),
    entry(
        "F45",
        "an instance that hangs with its connections open never triggers anything",
        TESTS + "test_f45_a_live_connection_that_brings_nothing_is_left",
        [M0, M1],
        burst(6, "fade ", at_s=ROUTED_START_S, max_tokens=50),
        [FaultSpec("stop-instance", "m0", ROUTED_START_S + 0.6, duration_s=25.0)],
    ),
    entry(
        "F46",
        "a fault in mid-stream ends as if all was well",
        TESTS + "test_f46_when_all_attempts_fail_mid_stream_there_is_an_error_and_an_end",
        [M0],
        burst(5, "fade ", at_s=ROUTED_START_S, max_tokens=50),
        [
            FaultSpec("kill-instance", "m0", ROUTED_START_S + 0.6, duration_s=2.0),
            FaultSpec("cut", "http r0", ROUTED_START_S + 3.0, duration_s=6.0, rate=0.3),
        ],
        expects=("is cut off: 5",),
        preempt_retry_count=0,
    ),
    entry(
        "F47",
        "retries multiply, and a 429 is retried",
        TESTS + "test_f47_a_429_is_not_retried_against_the_same_instance_and_retries_do_not_multiply",
        [SimInstanceSpec("m0", max_queue=14), SimInstanceSpec("m1", max_queue=14)],
        burst(30, "bee ", at_s=ROUTED_START_S, max_tokens=10),
        [
            FaultSpec("stop-worker", "m0", ROUTED_START_S - 0.1, duration_s=20.0),
            FaultSpec("stop-worker", "m1", ROUTED_START_S - 0.1, duration_s=20.0),
            FaultSpec("cut", "http r0.1>m", ROUTED_START_S, duration_s=5.0),
        ],
        expects=("is cut off: 50",),
        retry_budget=0.0,
    ),
    entry(
        "F48",
        "an abort by id misses the retry, and the losing side runs on",
        TESTS + "test_f48_an_abort_by_id_reaches_the_instance_that_has_it_now_and_both_sides_stop",
        [M0, M1],
        [
            SimRequest(
                f"q{index}", ROUTED_START_S, prompt=f"cab {index}", max_tokens=60, ignore_eos=True, abort_at_s=1.5
            )
            for index in range(6)
        ],
        [FaultSpec("stop-api", "m0", ROUTED_START_S + 0.4, duration_s=1.5), *BOTH_DIE],
        expects=("ends: aborted",),
    ),
    entry(
        "F49",
        "one missed sign of life removes an instance, or holds up the others'",
        REPLICAS + "TestProbes::test_f49_one_failed_probe_is_not_death",
        [M0, M1],
        burst(6, "decade ", at_s=ROUTED_START_S, max_tokens=60),
        [FaultSpec("refuse", "http m0", ROUTED_START_S, duration_s=1.5)],
    ),
    entry(
        "F50",
        "the reason of an abort is overwritten by what happens later",
        TESTS + "test_f50_an_abort_that_crosses_another_end_stays_an_abort",
        [M0, M1],
        [
            SimRequest(
                f"q{index}", ROUTED_START_S, prompt=f"cab {index}", max_tokens=60, ignore_eos=True, abort_at_s=0.8
            )
            for index in range(6)
        ],
        [
            on_message("POST /v1/abort", "kill-instance", "m0", wire="client", duration_s=1.5),
            on_message("POST /v1/abort", "kill-engine", "m1", nth=2, wire="client"),
        ],
        expects=("ends: aborted",),
        # One attempt for each stream, and one more for each stream that `m0` had; none follows an abort. Clients would
        # not notice an attempt that does, because an instance that knows of the abort refuses it.
        max_occurrences=(("POST /internal/attempt", 9),),
    ),
    entry(
        "F51",
        "bookings leak when a dispatch fails, and the instance looks busy for ever",
        TESTS + "test_f51_nothing_stays_booked_when_a_dispatch_fails",
        [M0, M1],
        burst(10, "bee ", at_s=ROUTED_START_S, gap_s=0.2, max_tokens=20),
        [
            FaultSpec("refuse", "http r0.1>m0", ROUTED_START_S, duration_s=1.0),
            FaultSpec("cut", "http r0.1>m1", ROUTED_START_S + 0.5, duration_s=1.5, rate=0.1),
        ],
    ),
    entry(
        "two-versions",
        "a canary's streams continue with their version, when a router or their client resumes them",
        SEVERAL_MODELS + "test_a_stream_that_breaks_goes_on_with_its_version_only",
        [
            SimInstanceSpec(f"m{index}", step_s=0.03, model=VERSIONS[index % 2], aliases=["canary-alias"])
            for index in range(4)
        ],
        [
            SimRequest(
                f"q{index}",
                ROUTED_START_S + index / 20,
                path=PATHS[index % 3],
                model="canary",
                versions=VERSIONS,
                prompt=f"face {index}",
                is_streaming=index % 4 > 0,
                max_tokens=50,
                seed=index,
                temperature=1.0,
                ignore_eos=True,
                disconnect_at_s=[0.8] if index % 4 == 1 else [],
            )
            for index in range(16)
        ],
        [
            # m0 and m2 are one version, m1 and m3 the other one.
            FaultSpec("kill-instance", "m0", ROUTED_START_S + 0.7, duration_s=1.5),
            FaultSpec("kill-instance", "m2", ROUTED_START_S + 0.8, duration_s=1.2),
            FaultSpec("kill-worker", "m1", ROUTED_START_S + 0.9),
            FaultSpec("kill-router", "r0", ROUTED_START_S + 1.4, duration_s=0.8),
            FaultSpec("kill-engine", "m3", ROUTED_START_S + 2.6),
        ],
        routes=["canary=hash:0.5,hash-v2:0.5"],
    ),
)
