"""The table of deliberate bugs for the simulator: where each shows, and within how many seeds it must."""

from onward.sim.catalogue import SCENARIOS
from onward.sim.invariants import CLIENT_ONLY_FAULTS
from onward.sim.scenario import Shape
from tests.sabotage.sim import bugs
from tests.sabotage.sim import draft_bugs as drafts
from tests.sabotage.sim.search import Row
from tests.sabotage.table import TABLE as TESTED

CALM = CLIENT_ONLY_FAULTS
"""Runs in which only single requests fail: every repair in them is a finding."""
_TESTED = {sabotage.name: sabotage for sabotage in TESTED}


def _tested(name: str, shape: Shape, max_seeds: int, only: frozenset[str] | None = None) -> Row:
    """A row of `tests/sabotage/table.py`."""
    known = _TESTED[name]
    return Row(name, known.breaks, known.apply, shape, max_seeds, only)


def _in(scenario: str, name: str) -> Row:
    """A row of `tests/sabotage/table.py`, in a scenario of the catalogue."""
    known, written = _TESTED[name], SCENARIOS[scenario].scenario
    assert written is not None, "a scenario that can be run"
    return Row(name, known.breaks, known.apply, written.shape, 3, scenario=scenario)


STEPS = [
    _tested("skip-epoch-check", "engine", 400),
    _tested("no-result-when-nothing-runs", "engine", 400, CALM),
    _tested("token-zero-dropped", "engine", 400),
    _tested("list-cut-at-preemption", "engine", 400),
    _tested("no-block-fence", "engine", 400),
    _tested("fence-survives-sharing", "cluster", 40),
    _tested("cached-before-computed", "engine", 400),
    _tested("abort-only-what-runs", "engine", 800, CALM),
    _tested("no-slot-needed", "engine", 400),
    _tested("wrong-victim", "engine", 400),
    _tested("forget-before-publish", "engine", 400),
    _tested("holding-before-deltas", "engine", 400),
    _tested("stop-decided-twice", "pd", 20),
    _tested("engine-and-worker-disagree", "engine", 20),
    Row(
        "silence-is-a-reply", "a slot that says nothing has answered its preempt", bugs.silence_is_a_reply, "engine", 20
    ),
    Row("admitted-without-room", "a request is let in before there is room", bugs.admitted_without_room, "engine", 20),
    Row("block-leaks", "the last block of a request is not given back", bugs.blocks_are_not_given_back, "engine", 400),
    Row("hashes-outlive-blocks", "an evicted block is still found", bugs.hashes_outlive_their_blocks, "engine", 400),
    Row("hash-without-parent", "a block's hash has its own tokens only", bugs.a_hash_without_the_parent, "engine", 400),
    Row("pool-keeps-hashes", "a new worker's pool has the old hashes", bugs.a_new_pool_keeps_its_hashes, "engine", 400),
    Row(
        "poison-for-ever", "a request that crashes every worker is tried again", bugs.a_suspect_is_let_go, "engine", 20
    ),
    Row("crashes-not-charged", "a crash is charged to no request", bugs.crashes_are_not_charged, "engine", 20),
    _tested("engine-deaths-not-charged", "engine", 100),
    _tested("all-charged-alone", "engine", 200),
    _tested("alone-not-told", "engine", 100),
    Row(
        "last-come-first-served",
        "a later request is served before an earlier one",
        bugs.the_last_is_first,
        "engine",
        100,
    ),
]

KV_MEMORY = [
    _tested("memory-of-crashed", "engine", 400, frozenset({"crash-worker"})),
    _tested("planned-length-kept", "engine", 400, frozenset({"kill-worker"})),
    _tested("seal-never-broken", "engine", 400, frozenset({"kill-engine"})),
    _tested("torn-rows-adopted", "engine", 400, frozenset({"kill-engine"})),
    _tested("fences-outlive-worker", "engine", 400, frozenset({"kill-worker"})),
    _tested("late-writes-reach-kept-memory", "pd", 200, frozenset({"late-kv"})),
    _tested("leases-outlive-worker", "pd", 60, frozenset({"kill-worker"})),
]

LOAD = [
    _in("suspect-under-load", "suspects-passed-by"),
    _in("preemption-in-vain", "preempted-without-enough-room"),
    _in("engine-deaths", "engine-deaths-no-suspects"),
    Row(
        "wall-clock-of-a-router",
        "a router's wall clock decides which request is served first",
        bugs.a_router_s_wall_clock_counts,
        "cluster",
        3,
        scenario="wrong-clock",
    ),
]

SEVERAL_MODELS = [_in("two-versions", "stream-crosses-versions")]

SUPERVISOR = [
    _tested("worker-outlives-its-engine", "engine", 40),
    _tested("worker-not-restarted", "engine", 100),
    _tested("worker-death-not-announced", "engine", 100),
    _tested("engine-death-not-announced", "engine", 100),
    _tested("api-death-not-announced", "engine", 200),
    _tested("api-without-engine", "engine", 200),
    _tested("stream-store-not-announced", "engine", 40),
    _in("hung-worker", "silence-tolerated"),
]

TRACKER = [
    Row("abort-without-epoch", "an abort ends the next attempt too", bugs.an_abort_without_its_epoch, "engine", 400),
    Row("ends-filtered", "an end token is not in the history", bugs.ends_are_filtered_in_the_history, "engine", 400),
    Row("last-token-forgotten", "a resubmission is short", bugs.the_last_token_is_not_resubmitted, "engine", 1000),
    Row(
        "same-epoch-again",
        "a resubmission has no higher epoch",
        bugs.a_resubmission_under_the_same_epoch,
        "engine",
        10,
        frozenset({"lose"}),
    ),
    Row("duplicates-delivered", "a repeated token is delivered again", bugs.duplicates_are_delivered, "engine", 60),
    Row("gaps-delivered", "a lost token is skipped", bugs.gaps_are_delivered, "engine", 400),
    Row(
        "held-requests-not-reported",
        "the engine does not report which requests it holds",
        bugs.held_requests_are_not_reported,
        "engine",
        10,
        frozenset({"lose"}),
    ),
    Row("said-twice", "each message to the api goes out twice", bugs.everything_is_said_twice, "engine", 400),
]

TEXT = [
    Row("held-bytes-dropped", "half a character at the end is lost", bugs.held_back_bytes_are_dropped, "engine", 400),
    Row("held-text-dropped", "text held for a stop string is lost", bugs.held_back_text_is_dropped, "cluster", 60),
    Row("nothing-held-back", "the beginning of a stop string is shown", bugs.nothing_is_held_back, "cluster", 40),
    _tested("tokens-decoded-singly", "engine", 400),
]

KV = [
    _tested("leased-freed-at-once", "pd", 150),
    _in("F22", "decode-ends-silently"),
    _tested("grant-each-offer", "pd", 20),
    _tested("granted-is-running", "pd", 20),
    _tested("leases-not-counted", "pd", 20),
    _tested("wait-for-transfers", "pd", 30, CALM),
    _tested("no-lease-at-the-end", "pd", 150),
    _tested("peer-s-death-is-ours", "pd", 150),
    _in("F21", "no-heartbeats"),
    _in("F23", "failed-push-only-logged"),
    _in("F24", "refusal-not-sent"),
    Row("sending-not-held", "what a transfer reads is reused", bugs.what_is_sent_is_not_held, "pd", 80),
    Row(
        "late-offer-granted",
        "an offer after the end takes blocks",
        bugs.a_late_offer_is_granted,
        "pd",
        20,
        frozenset({"delay", "reorder", "abort"}),
    ),
    Row(
        "lost-writer-forgotten",
        "blocks are waited for whose writer is dead",
        bugs.a_lost_writer_is_forgotten,
        "pd",
        400,
        frozenset({"break-kv", "kill-worker"}),
    ),
]

ROUTER = [
    _tested("tail-only", "cluster", 30),
    _tested("retry-starts-over", "cluster", 40),
    _tested("empty-200", "cluster", 40),
    _tested("first-choice-only", "cluster", 40),
    _tested("only-chat-retried", "cluster", 30),
    _tested("only-whole-retried", "cluster", 30),
    _tested("output-becomes-prompt", "cluster", 40),
    _tested("limits-from-the-break", "cluster", 40),
    _tested("stop-strings-forget", "cluster", 30),
    _tested("text-encoded-again", "cluster", 40),
    _tested("no-error-event", "cluster", 40),
    _tested("no-done-behind-error", "cluster", 40),
    _in("F47", "no-retry-budget"),
    _tested("new-id-per-attempt", "cluster", 40),
    _tested("loser-runs-on", "cluster", 40),
    _in("F50", "abort-only-cuts"),
    _in("F51", "failed-dispatch-stays-reserved"),
    _tested("prefill-stays-reserved", "cluster", 30),
    Row("seed-per-attempt", "a retry has another seed", bugs.each_attempt_has_its_own_seed, "cluster", 40),
    Row("time-per-attempt", "a retry has another time", bugs.each_attempt_has_its_own_time, "cluster", 40),
    Row("retry-is-short", "a retry lacks the last token", bugs.retries_begin_without_the_last_token, "cluster", 120),
    Row("one-epoch-for-all", "retries have one epoch", bugs.every_attempt_has_the_same_epoch, "cluster", 40),
    Row("losses-are-final", "a lost instance ends its streams", bugs.every_loss_is_final, "cluster", 30),
]

GRAMMAR = [
    _tested("grammar-starts-over", "engine", 20),
    _tested("stale-mask", "engine", 20),
    _tested("grammar-end-ignored", "engine", 20),
    _tested("grammar-end-not-handed-off", "pd", 100),
]

VECTORS = [
    Row("mean-from-cache", "a mean lacks the rows that were cached", bugs.a_mean_from_the_cache, "engine", 100),
    Row("vectors-swapped", "a text gets another's vector", bugs.vectors_change_places, "engine", 60),
]

DETACHED = [
    Row(
        "disconnected-runs-on",
        "a request runs on after its client left",
        bugs.a_disconnected_request_runs_on,
        "engine",
        100,
        CALM,
    ),
]

RESPONSES = [
    _tested("cancel-not-told", "engine", 150, CALM),
    _tested("aborted-response-fails", "engine", 150, CALM),
    _tested("aborted-response-dropped", "engine", 150, CALM),
    _tested("number-told-twice", "engine", 200),
    _tested("starting-at", "engine", 100),
    _tested("response-kept-for-ever", "engine", 60),
    _tested("tied-to-its-creator", "engine", 100, CALM),
    _tested("started-not-stored", "engine", 200, frozenset({"kill-api", "detach"})),
    Row(
        "cancel-stays-at-the-router",
        "a router remembers a cancel and tells no instance",
        bugs.a_cancel_stays_at_the_router,
        "cluster",
        60,
        CALM,
    ),
]

DRAFTS = [
    Row("rejected-cached", "a rejected token is cached", drafts.a_rejected_draft_is_cached, "engine", 40),
    Row("rejected-computed", "draft KV counts as computed", drafts.a_rejected_draft_counts_as_computed, "engine", 40),
    Row("rejected-told", "a rejected draft takes a position", drafts.a_rejected_draft_takes_a_position, "engine", 40),
    Row(
        "peer-draft-accepted", "a peer's draft takes a position", drafts.a_draft_of_the_peer_takes_a_position, "pd", 60
    ),
    Row("run-not-cut", "a stop inside an accepted run is not cut", drafts.what_follows_a_stop_is_kept, "engine", 40),
    Row(
        "drafts-not-planned", "drafts in flight are not counted", drafts.drafts_in_flight_are_not_counted, "engine", 40
    ),
    Row("drafts-without-blocks", "drafts have no blocks", drafts.drafts_have_no_blocks, "engine", 40),
]

TABLE = [
    *STEPS,
    *KV_MEMORY,
    *LOAD,
    *SEVERAL_MODELS,
    *SUPERVISOR,
    *TRACKER,
    *TEXT,
    *KV,
    *ROUTER,
    *GRAMMAR,
    *VECTORS,
    *DETACHED,
    *RESPONSES,
    *DRAFTS,
]
QUICK = {
    "skip-epoch-check",
    "silence-is-a-reply",
    "no-block-fence",
    "forget-before-publish",
    "wrong-victim",
    "pool-keeps-hashes",
    "memory-of-crashed",
    "planned-length-kept",
    "poison-for-ever",
    "last-come-first-served",
    "suspects-passed-by",
    "preempted-without-enough-room",
    "engine-deaths-no-suspects",
    "wall-clock-of-a-router",
    "abort-without-epoch",
    "duplicates-delivered",
    "held-requests-not-reported",
    "held-bytes-dropped",
    "leased-freed-at-once",
    "decode-ends-silently",
    "grant-each-offer",
    "grammar-starts-over",
    "stale-mask",
    "grammar-end-ignored",
    "vectors-swapped",
    "late-offer-granted",
    "refusal-not-sent",
    "retry-starts-over",
    "seed-per-attempt",
    "no-retry-budget",
    "failed-dispatch-stays-reserved",
    "rejected-cached",
    "rejected-computed",
    "drafts-not-planned",
    "rejected-told",
    "run-not-cut",
    "drafts-without-blocks",
}
"""Shown by the first few seeds, all of them together in seconds."""
