"""The request tracker against an engine whose wire loses, repeats and delays: every token once, in order."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.api.engine_link.request_tracker import (
    ABORT_REPLAY_S,
    ABORTED,
    DEADLINE_MARGIN_S,
    ENGINE_WAIT_S,
    FIRST_REPLY_TIMEOUT_S,
    MAX_REPLAYED_ABORTS,
    MAX_REPORTS_WITHOUT_READ,
    MAX_RESUBMISSIONS_WITHOUT_PROGRESS,
    RequestTracker,
    TrackerActions,
    base_epoch,
)
from onward.obs.metrics import Registry
from onward.proto.engine import (
    Abort,
    AbortByName,
    CallerLimits,
    ErrorInfo,
    FromEngine,
    HeldRequest,
    HeldRequestsReport,
    RequestAccepted,
    Submit,
    ToEngine,
    TokenDelta,
    TokenDeltas,
    WorkerCrashReport,
)
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import TokenLogprobs
from tests.api.stand_in_engine import StandInEngine, expected_tokens, made_up_logprobs


def order(name: str = "a-0", max_tokens: int = 8, attempt_epoch: int = 1, **more: object) -> Submit:
    sampling = SamplingParams(seed=7, max_tokens=max_tokens)
    return Submit(0, name, base_epoch(attempt_epoch), [1, 2, 3], sampling, **more)  # type: ignore[arg-type]


def delta(position: int, *tokens: int, epoch: int = 1, **more: object) -> TokenDeltas:
    return TokenDeltas(1, [TokenDelta("a-0", epoch, position, list(tokens), 3, 2, **more)])  # type: ignore[arg-type]


def only_submit(actions: TrackerActions) -> Submit:
    [message] = actions.send
    assert isinstance(message, Submit)
    return message


def delivered(actions: TrackerActions) -> list[int]:
    return [token for one in actions.deliver for token in one.token_ids]


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def tracker(registry: Registry) -> RequestTracker:
    tracker = RequestTracker(registry)
    tracker.engine_up("engine-1", 0.0)
    return tracker


def counts(registry: Registry) -> dict[str, float]:
    """Label value to count, over both counters of the request tracker."""
    found: Counter[str] = Counter()
    for family in registry.snapshot():
        for series in family.series:
            found[next(iter(series.labels.values()))] += int(series.value)
    return dict(found)


def test_a_request_waits_for_an_engine_and_is_then_submitted_once(registry: Registry) -> None:
    tracker = RequestTracker(registry)
    assert tracker.submit(order(), 0.0) == TrackerActions()
    submit = only_submit(tracker.engine_up("engine-1", 1.0))
    assert (submit.request_id, submit.epoch, submit.generated_token_ids) == ("a-0", 1, [])
    assert counts(registry) == {}
    assert tracker.engine_up("engine-1", 2.0) == TrackerActions()


def test_tokens_are_delivered_as_they_come_and_the_end_forgets_the_request(tracker: RequestTracker) -> None:
    tracker.submit(order(), 0.0)
    assert delivered(tracker.receive("engine-1", delta(0, 5), 0.0)) == [5]
    last = tracker.receive("engine-1", delta(1, 6, finish_reason="stop"), 0.0)
    assert [(one.token_ids, one.finish_reason) for one in last.deliver] == [([6], "stop")]
    assert len(tracker) == 0


def test_a_duplicate_is_dropped_and_counted(tracker: RequestTracker, registry: Registry) -> None:
    tracker.submit(order(), 0.0)
    tracker.receive("engine-1", delta(0, 5, 6), 0.0)
    assert tracker.receive("engine-1", delta(0, 5), 0.0) == TrackerActions()
    assert tracker.receive("engine-1", delta(0, 5, 6), 0.0) == TrackerActions()
    assert counts(registry) == {"duplicate": 2}


def test_of_a_delta_that_overlaps_only_the_new_tokens_are_taken(tracker: RequestTracker) -> None:
    tracker.submit(order(), 0.0)
    tracker.receive("engine-1", delta(0, 5, 6), 0.0)
    assert delivered(tracker.receive("engine-1", delta(1, 6, 7), 0.0)) == [7]


def test_a_gap_is_repaired_by_a_resubmission_and_never_delivered(tracker: RequestTracker, registry: Registry) -> None:
    tracker.submit(order(), 0.0)
    tracker.receive("engine-1", delta(0, 5), 0.0)
    actions = tracker.receive("engine-1", delta(2, 9), 0.0)
    submit = only_submit(actions)
    assert (submit.epoch, submit.generated_token_ids, actions.deliver) == (2, [5], [])
    assert tracker.receive("engine-1", delta(1, 6), 0.0) == TrackerActions()
    assert delivered(tracker.receive("engine-1", delta(1, 6, epoch=2), 0.0)) == [6]
    assert counts(registry) == {"gap": 1, "epoch": 1}


def test_another_engine_gets_everything_unfinished_with_the_tokens_so_far(
    tracker: RequestTracker, registry: Registry
) -> None:
    tracker.submit(order(waited_s=11.0, priority=3, cache_salt="s"), 0.0)
    tracker.receive("engine-1", WorkerCrashReport("a-0", 1, 0), 0.0)
    tracker.receive("engine-1", delta(0, 5), 0.0)
    tracker.receive("engine-1", WorkerCrashReport("a-0", 1, 2), 0.0)
    tracker.engine_gone("engine-1", 1.0)
    submit = only_submit(tracker.engine_up("engine-2", 2.0))
    assert submit == Submit(
        seq=2,
        request_id="a-0",
        epoch=2,
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(seed=7, max_tokens=8),
        generated_token_ids=[5],
        waited_s=13.0,
        priority=3,
        cache_salt="s",
        worker_crashes=2,
        engine_crashes=1,
        num_cached_tokens=2,
        restart_cause="engine",
    )
    assert counts(registry) == {"engine_restart": 1}


def test_whose_request_it_is_is_said_each_time_and_that_it_is_new_only_once(tracker: RequestTracker) -> None:
    limits = CallerLimits(max_in_flight=2, tokens_per_minute=100)
    first = only_submit(
        tracker.submit(order(caller="ann", caller_limits=limits, admit_as_new=True, attempt_epoch=3), 0.0)
    )
    again = only_submit(tracker.engine_up("engine-2", 1.0))
    assert [(one.caller, one.caller_limits, one.admit_as_new) for one in (first, again)] == [
        ("ann", limits, True),
        ("ann", limits, False),
    ]


def test_a_caller_s_abort_is_about_its_own_requests(tracker: RequestTracker) -> None:
    tracker.submit(order("a-0", client_request_id="red", caller="ann"), 0.0)
    tracker.submit(order("b-0", client_request_id="red", caller="bob"), 0.0)
    assert tracker.matching_names(["a", "b", "red"], False, "ann") == {"a", "red"}
    actions = tracker.abort_by_name(9, ["a", "b", "red", "later"], False, 0.0, "ann")
    assert [one.request_id for one in actions.deliver] == ["a-0"]
    asked = actions.send[0]
    assert isinstance(asked, AbortByName) and asked.caller == "ann"
    tracker.engine_gone("engine-1", 1.0)
    said_again = tracker.engine_up("engine-2", 2.0).send[0]
    assert isinstance(said_again, AbortByName) and said_again.caller == "ann"
    assert tracker.submit(order("later-0", caller="bob"), 3.0).deliver == []
    assert [one.error for one in tracker.submit(order("later-1", caller="ann"), 3.0).deliver] == [ABORTED]


def test_words_of_an_engine_that_was_replaced_are_dropped(tracker: RequestTracker, registry: Registry) -> None:
    tracker.submit(order(), 0.0)
    tracker.engine_up("engine-2", 0.0)
    assert tracker.receive("engine-1", delta(0, 5, epoch=2), 0.0) == TrackerActions()
    assert counts(registry)["incarnation"] == 1


def test_a_token_clears_the_crash_charges(tracker: RequestTracker) -> None:
    tracker.submit(order(), 0.0)
    tracker.receive("engine-1", WorkerCrashReport("a-0", 1, 2), 0.0)
    tracker.receive("engine-1", delta(0, 5), 0.0)
    assert only_submit(tracker.engine_up("engine-2", 1.0)).worker_crashes == 0


def test_the_cached_tokens_of_the_first_admission_are_what_the_client_is_told(tracker: RequestTracker) -> None:
    tracker.submit(order(), 0.0)
    tracker.receive("engine-1", delta(0, 5), 0.0)
    tracker.engine_up("engine-2", 1.0)
    later = TokenDeltas(1, [TokenDelta("a-0", 2, 1, [6], 3, num_cached_tokens=99)])
    [one] = tracker.receive("engine-2", later, 1.0).deliver
    assert one.num_cached_tokens == 2


def test_holding_shows_what_was_lost_and_it_is_resubmitted(tracker: RequestTracker, registry: Registry) -> None:
    tracker.submit(order(), 0.0)
    early = HeldRequestsReport("engine-1", 0, 1, [])
    assert tracker.receive("engine-1", early, 0.0) == TrackerActions(), "the engine had not read the submission yet"
    submit = only_submit(tracker.receive("engine-1", HeldRequestsReport("engine-1", 1, 1, []), 0.0))
    assert submit.epoch == 2
    older = HeldRequestsReport("engine-1", submit.seq, 1, [HeldRequest("a-0", 1, 0)])
    assert only_submit(tracker.receive("engine-1", older, 0.0)).epoch == 3
    assert counts(registry) == {"lost": 2}


def test_a_submission_that_was_the_last_message_and_is_lost_is_sent_again(tracker: RequestTracker) -> None:
    tracker.submit(order(), 0.0)
    nothing_read = HeldRequestsReport("engine-1", 0, 1, [])
    for _ in range(MAX_REPORTS_WITHOUT_READ):
        assert tracker.receive("engine-1", nothing_read, 0.0) == TrackerActions()
    assert only_submit(tracker.receive("engine-1", nothing_read, 0.0)).epoch == 2


def test_holding_that_is_further_than_we_are_is_a_gap(tracker: RequestTracker, registry: Registry) -> None:
    tracker.submit(order(), 0.0)
    ahead = HeldRequestsReport("engine-1", 1, 1, [HeldRequest("a-0", 1, 4)])
    assert only_submit(tracker.receive("engine-1", ahead, 0.0)).epoch == 2
    assert counts(registry) == {"gap": 1}


def test_holding_stands_in_for_an_acceptance_that_was_lost(tracker: RequestTracker) -> None:
    tracker.submit(order(), 0.0)
    held = HeldRequestsReport("engine-1", 1, 1, [HeldRequest("a-0", 1, 0)])
    assert [one.request_id for one in tracker.receive("engine-1", held, 0.0).deliver] == ["a-0"]
    assert tracker.receive("engine-1", RequestAccepted("a-0", 1), 0.0) == TrackerActions(), "it is told once"


def test_what_the_engine_holds_and_we_do_not_know_is_aborted(tracker: RequestTracker) -> None:
    actions = tracker.receive("engine-1", HeldRequestsReport("engine-1", 0, 1, [HeldRequest("b-0", 4, 9)]), 0.0)
    assert actions.send == [Abort(1, "b-0", 4)]


def test_a_stop_string_ends_the_request_at_its_length(tracker: RequestTracker) -> None:
    tracker.submit(order(), 0.0)
    tracker.receive("engine-1", delta(0, 5, 6, 7), 0.0)
    assert tracker.stop("a-0", 2).send == [Abort(2, "a-0", 1, "stop", 2)]
    assert tracker.receive("engine-1", delta(3, 8), 0.0) == TrackerActions()
    assert tracker.stop("a-0", 2) == TrackerActions()


def test_an_abort_ends_this_attempt_and_no_later_one_and_is_idempotent(tracker: RequestTracker) -> None:
    tracker.submit(order(), 0.0)
    assert tracker.abort("a-0").send == [Abort(2, "a-0", 1)]
    assert tracker.abort("a-0") == TrackerActions()
    assert len(tracker) == 0


def test_a_refusal_of_a_new_request_is_final(tracker: RequestTracker) -> None:
    tracker.submit(order(), 0.0)
    full = ErrorInfo("overloaded", "full", 429, True, retry_after_s=2.0)
    [one] = tracker.receive("engine-1", delta(0, finish_reason="error", error=full), 0.0).deliver
    assert one.error == full
    assert len(tracker) == 0


def test_a_refusal_of_a_resumed_request_means_to_wait(tracker: RequestTracker) -> None:
    tracker.submit(order(), 0.0)
    tracker.receive("engine-1", RequestAccepted("a-0", 1), 0.0)
    tracker.receive("engine-1", delta(0, 5), 0.0)
    tracker.engine_up("engine-2", 1.0)
    full = ErrorInfo("overloaded", "full", 429, True, retry_after_s=2.0)
    refused = delta(1, epoch=2, finish_reason="error", error=full)
    assert tracker.receive("engine-2", refused, 1.0) == TrackerActions()
    assert tracker.tick(2.9) == TrackerActions()
    assert only_submit(tracker.tick(3.0)).generated_token_ids == [5]


def test_a_request_waits_no_longer_than_a_minute_for_an_engine(registry: Registry) -> None:
    tracker = RequestTracker(registry)
    tracker.submit(order(), 5.0)
    assert tracker.tick(5.0 + ENGINE_WAIT_S - 0.1) == TrackerActions()
    [one] = tracker.tick(5.0 + ENGINE_WAIT_S).deliver
    assert one.error is not None
    assert (one.error.status, one.error.retryable) == (503, True)


def test_an_accepted_request_may_take_as_long_as_it_takes(tracker: RequestTracker) -> None:
    tracker.submit(order(), 0.0)
    tracker.receive("engine-1", RequestAccepted("a-0", 1), 0.0)
    assert tracker.tick(1e6) == TrackerActions()


def test_the_deadline_travels_as_time_left_and_ends_a_request_the_engine_has_forgotten(tracker: RequestTracker) -> None:
    assert only_submit(tracker.submit(order(deadline_in_s=6.0), 4.0)).deadline_in_s == 6.0
    assert only_submit(tracker.engine_up("engine-2", 9.0)).deadline_in_s == 1.0
    assert tracker.tick(10.0) == TrackerActions(), "the engine says it first"
    actions = tracker.tick(10.0 + DEADLINE_MARGIN_S)
    assert actions.deliver[0].error is not None
    assert actions.deliver[0].error.code == "deadline_exceeded"
    assert [type(one) for one in actions.send] == [Abort]


def test_repairs_without_a_token_have_a_bound(tracker: RequestTracker) -> None:
    actions = tracker.submit(order(), 0.0)
    for _ in range(MAX_RESUBMISSIONS_WITHOUT_PROGRESS):
        seq = only_submit(actions).seq
        actions = tracker.receive("engine-1", HeldRequestsReport("engine-1", seq, 1, []), 0.0)
    actions = tracker.receive("engine-1", HeldRequestsReport("engine-1", only_submit(actions).seq, 1, []), 0.0)
    assert actions.deliver[0].error is not None
    assert actions.deliver[0].error.code == "engine_lost_request"
    assert len(tracker) == 0


def logprobs(*positions: int) -> list[TokenLogprobs]:
    return [made_up_logprobs(0, position, 1) for position in positions]


def test_logprobs_are_cut_like_the_tokens_they_belong_to(tracker: RequestTracker) -> None:
    tracker.submit(order(), 0.0)
    first = delta(0, 5, 6, logprobs=logprobs(0, 1), prompt_logprobs=logprobs(8, 9))
    overlapping = delta(0, 5, 6, 7, logprobs=logprobs(0, 1, 2), prompt_logprobs=logprobs(8, 9))
    [one] = tracker.receive("engine-1", first, 0.0).deliver
    assert (one.token_ids, one.logprobs, one.prompt_logprobs) == ([5, 6], logprobs(0, 1), logprobs(8, 9))
    [two] = tracker.receive("engine-1", overlapping, 0.0).deliver
    assert (two.token_ids, two.logprobs, two.prompt_logprobs) == ([7], logprobs(2), None)


def test_an_abort_by_somebody_else_is_an_error_of_its_own(tracker: RequestTracker) -> None:
    tracker.submit(order(), 0.0)
    tracker.receive("engine-1", delta(0, 5), 0.0)
    [one] = tracker.receive("engine-1", delta(1, finish_reason="abort"), 0.0).deliver
    assert one.error == ABORTED
    assert len(tracker) == 0


def test_an_abort_by_name_asks_the_engine_and_ends_our_own_at_once(tracker: RequestTracker) -> None:
    for name, label in (("a-0", "red"), ("a-1", "red"), ("b-0", "blue"), ("c-0", "")):
        tracker.submit(order(name, client_request_id=label), 0.0)
    assert tracker.matching_names(["red", "b", "", "x", "re"], abort_all=False) == {"red", "b"}
    assert tracker.matching_names([], abort_all=True) == {"a", "b", "c"}
    actions = tracker.abort_by_name(9, ["red", "b", "", "x", "re"], False, 0.0)
    assert actions.send[0] == AbortByName(5, 9, ["red", "b", "", "x", "re"])
    assert [(one.request_id, one.error) for one in actions.deliver] == [
        ("a-0", ABORTED),
        ("a-1", ABORTED),
        ("b-0", ABORTED),
    ]
    assert len(tracker) == 1


def test_an_abort_by_name_works_while_there_is_no_engine(registry: Registry) -> None:
    tracker = RequestTracker(registry)
    tracker.submit(order("a-0"), 0.0)
    tracker.submit(order("b-0"), 0.0)
    actions = tracker.abort_by_name(1, [], True, 0.0)
    assert (actions.send, [one.request_id for one in actions.deliver]) == ([], ["a-0", "b-0"])
    assert [type(message) for message in tracker.engine_up("engine-1", 1.0).send] == [AbortByName]


def test_an_abort_is_said_again_to_a_new_engine_for_others_may_resubmit_what_it_ends(tracker: RequestTracker) -> None:
    tracker.submit(order("mine-0"), 0.0)
    tracker.abort_by_name(9, ["theirs", "label"], False, 1.0)
    tracker.engine_gone("engine-1", 2.0)
    again = {"query_id": 9, "names": ["label", "theirs"], "abort_all": False}
    first, submit = tracker.engine_up("engine-2", 3.0).send
    assert isinstance(first, AbortByName) and isinstance(submit, Submit)
    assert {name: getattr(first, name) for name in again} == again
    held = [HeldRequest("mine-0", submit.epoch, 0)]
    for step, now_s in enumerate((4.0, 5.0, ABORT_REPLAY_S), 1):
        [later] = tracker.receive("engine-2", HeldRequestsReport("engine-2", submit.seq, step, held), now_s).send
        assert {name: getattr(later, name) for name in again} == again, "others may resubmit late"
    assert (
        tracker.receive("engine-2", HeldRequestsReport("engine-2", submit.seq, 9, held), 1.0 + ABORT_REPLAY_S).send
        == []
    )
    tracker.engine_gone("engine-2", 1.0 + ABORT_REPLAY_S)
    assert isinstance(only_submit(tracker.engine_up("engine-3", 1.0 + ABORT_REPLAY_S)), Submit)


def test_an_attempt_that_comes_after_the_abort_of_its_id_is_not_begun(tracker: RequestTracker) -> None:
    tracker.abort_by_name(9, ["a", "label"], False, 0.0)
    actions = tracker.submit(order("a-0", attempt_epoch=2), 1.0)
    assert (actions.send, [one.error for one in actions.deliver], len(tracker)) == ([], [ABORTED], 0)
    assert only_submit(tracker.submit(order("b-0", client_request_id="label"), 1.0)), "a label may be another's by now"
    assert only_submit(tracker.submit(order("a-1", attempt_epoch=3), ABORT_REPLAY_S))


def test_only_so_many_aborts_are_remembered(tracker: RequestTracker) -> None:
    for number in range(MAX_REPLAYED_ABORTS + 10):
        tracker.abort_by_name(number, [f"n{number}"], False, 0.0)
    assert len(tracker.engine_up("engine-2", 1.0).send) == MAX_REPLAYED_ABORTS


def test_the_label_goes_along_with_every_attempt(tracker: RequestTracker) -> None:
    assert only_submit(tracker.submit(order(client_request_id="mine"), 0.0)).client_request_id == "mine"
    assert only_submit(tracker.engine_up("engine-2", 1.0)).client_request_id == "mine"


PREEMPTED = ErrorInfo("pd_preempted", "PD Error: out of blocks", 503, True, retry_after_s=2.0, stage="decode")


def test_what_the_engine_gives_up_has_ended_and_is_not_tried_again(tracker: RequestTracker) -> None:
    tracker.submit(order(), 0.0)
    tracker.receive("engine-1", RequestAccepted("a-0", 1), 0.0)
    given_up = delta(0, 5, 6, finish_reason="pd_reschedule", error=PREEMPTED)
    actions = tracker.receive("engine-1", given_up, 0.0)
    [one] = actions.deliver
    assert (one.token_ids, one.finish_reason, one.error) == ([5, 6], "pd_reschedule", PREEMPTED)
    assert (one.failed, one.num_cached_tokens, actions.send, len(tracker)) == (False, 2, [], 0)
    assert tracker.tick(100.0) == tracker.engine_up("engine-2", 100.0) == TrackerActions()


LAYOUT_MISMATCH = ErrorInfo("pd_layout_mismatch", "PD Error: 16 heads, not 8", 400, stage="prefill")


@pytest.mark.parametrize(("error", "reason"), [(PREEMPTED, "pd_reschedule"), (LAYOUT_MISMATCH, "error")])
def test_an_error_of_a_handoff_is_a_reschedule_unless_it_is_final(
    tracker: RequestTracker, error: ErrorInfo, reason: str
) -> None:
    tracker.submit(order(), 0.0)
    tracker.receive("engine-1", RequestAccepted("a-0", 1), 0.0)
    [one] = tracker.receive("engine-1", delta(0, finish_reason="error", error=error), 0.0).deliver
    assert (one.finish_reason, one.error, len(tracker)) == (reason, error, 0)


def test_the_end_of_an_attempt_is_not_taken_for_that_of_a_later_one_with_the_same_number(
    tracker: RequestTracker,
) -> None:
    """Its client saw nothing of the first, and so came back with the same cursor."""
    tracker.submit(order(attempt_epoch=2), 0.0)
    [aborted] = tracker.abort("a-0").send
    [again] = tracker.submit(order(attempt_epoch=2), 0.0).send
    assert again.epoch > aborted.epoch
    end = delta(0, finish_reason="abort", epoch=aborted.epoch)
    assert tracker.receive("engine-1", end, 0.0) == TrackerActions()
    assert len(tracker) == 1


def test_a_reschedule_behind_a_gap_is_repaired_like_any_other_word(tracker: RequestTracker) -> None:
    tracker.submit(order(), 0.0)
    given_up = delta(2, finish_reason="pd_reschedule", error=PREEMPTED)
    assert only_submit(tracker.receive("engine-1", given_up, 0.0)).epoch == 2


def test_an_abort_stays_an_abort_whatever_else_befell_the_request(tracker: RequestTracker) -> None:
    tracker.submit(order(), 0.0)
    tracker.receive("engine-1", RequestAccepted("a-0", 1), 0.0)
    [one] = tracker.receive("engine-1", delta(0, 5, finish_reason="abort", error=PREEMPTED), 0.0).deliver
    assert (one.finish_reason, one.error, one.failed, len(tracker)) == ("abort", ABORTED, False, 0)


def test_a_reschedule_that_comes_behind_a_users_abort_is_not_heard(tracker: RequestTracker) -> None:
    tracker.submit(order(), 0.0)
    tracker.receive("engine-1", delta(0, 5), 0.0)
    assert tracker.abort_by_name(1, ["a"], False, 0.0).deliver[0].error == ABORTED
    assert (
        tracker.receive("engine-1", delta(1, finish_reason="pd_reschedule", error=PREEMPTED), 0.0) == TrackerActions()
    )


def test_logprobs_to_be_told_again_are_asked_for_until_they_have_come(tracker: RequestTracker) -> None:
    given = order(generated_token_ids=[5, 6, 7], rescore_from=1)
    assert only_submit(tracker.submit(given, 0.0)).rescore_from == 1
    assert only_submit(tracker.engine_up("engine-2", 1.0)).rescore_from == 1
    without = delta(3, 8, epoch=2)
    assert only_submit(tracker.receive("engine-2", without, 1.0)).rescore_from == 1, "tokens never overtake them"
    [one] = tracker.receive("engine-2", delta(3, 8, epoch=3, rescored_logprobs=logprobs(1, 2)), 1.0).deliver
    assert (one.token_ids, one.rescored_logprobs) == ([8], logprobs(1, 2))
    submit = only_submit(tracker.engine_up("engine-3", 2.0))
    assert (submit.generated_token_ids, submit.rescore_from) == ([5, 6, 7, 8], None)


class FaultyWire:
    """Between one request tracker and its engines: in order, but losing and repeating; engines die and clients leave."""

    def __init__(self, seed: int, num_requests: int, *, lossy: bool, mortal: bool) -> None:
        self._random = random.Random(seed)
        self._lossy = lossy
        self._mortal = mortal
        self.left: set[str] = set()
        self.tracker = RequestTracker(Registry())
        self.orders = [self._order(i) for i in range(num_requests)]
        self.logprobs: dict[str, list[TokenLogprobs]] = {one.request_id: [] for one in self.orders}
        self.prompt_logprobs: Counter[str] = Counter()
        self.outputs = {one.request_id: list(one.generated_token_ids) for one in self.orders}
        self.ends: list[str] = []
        self._to_engine: list[ToEngine] = []
        self._to_api: list[FromEngine] = []
        self._engine = StandInEngine("engine-0")

    def _order(self, index: int) -> Submit:
        """Every second one goes on from an earlier answer, with logprobs of its tokens to be told again."""
        sampling = SamplingParams(7, max_tokens=3 + 5 * index, logprobs=2, prompt_logprobs=None if index % 2 else 1)
        if index % 2 == 0:
            return Submit(0, f"r-{index}", 0, [1, 2, 3], sampling)
        given = expected_tokens([1, 2, 3], sampling, 4)
        return Submit(0, f"r-{index}", 0, [1, 2, 3], sampling, given, rescore_from=1)

    def run(self, max_rounds: int = 3000) -> None:
        self._restart(0)
        for one in self.orders:
            self._perform(self.tracker.submit(one, 0.0))
        for round_number in range(max_rounds):
            if not len(self.tracker):
                break
            self._round(round_number)
        # With the wire whole again, the two sides must come to agree on nothing.
        self._lossy = False
        for _ in range(2):
            self._exchange()
            self._to_api.append(self._engine.holding())
            self._exchange()

    def _round(self, number: int) -> None:
        if self._mortal and self._random.random() < 0.05:
            self._restart(number)
        if self._lossy and self._random.random() < 0.02:
            leaving = self._random.choice(self.orders).request_id
            self.left.add(leaving)
            self._perform(self.tracker.abort(leaving))
        if (deltas := self._engine.step()) is not None:
            self._to_api.append(deltas)
        if number % 5 == 0:
            self._to_api.append(self._engine.holding())
        self._exchange()

    def _restart(self, number: int) -> None:
        self.tracker.engine_gone(self._engine.incarnation, 0.0)
        self._engine = StandInEngine(f"engine-{number + 1}")
        self._to_engine, self._to_api = [], []
        self._perform(self.tracker.engine_up(self._engine.incarnation, 0.0))

    def _exchange(self) -> None:
        for message in self._faulty(self._to_engine):
            self._to_api += self._engine.handle(message)
        self._to_engine = []
        arrived, self._to_api = self._faulty(self._to_api), []
        for message in arrived:
            self._perform(self.tracker.receive(self._engine.incarnation, message, 0.0))

    def _faulty(self, messages: list) -> list:  # type: ignore[type-arg]
        if not self._lossy:
            return messages
        copies = [(one, self._random.choice([0, 1, 1, 1, 1, 1, 2])) for one in messages]
        return [one for one, count in copies for _ in range(count)]

    def _perform(self, actions: TrackerActions) -> None:
        self._to_engine += actions.send
        for one in actions.deliver:
            assert one.request_id not in self.ends, "nothing follows an end"
            assert one.error is None, one.error
            self.outputs[one.request_id] += one.token_ids
            self.logprobs[one.request_id] += (one.rescored_logprobs or []) + (one.logprobs or [])
            self.prompt_logprobs[one.request_id] += one.prompt_logprobs is not None
            if one.finish_reason is not None:
                self.ends.append(one.request_id)

    def nothing_is_held(self) -> bool:
        return not self._engine.running and not len(self.tracker)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), num_requests=st.integers(1, 5), lossy=st.booleans(), mortal=st.booleans())
def test_every_token_is_delivered_once_and_in_order_whatever_the_wire_does(
    seed: int, num_requests: int, lossy: bool, mortal: bool
) -> None:
    wire = FaultyWire(seed, num_requests, lossy=lossy, mortal=mortal)
    wire.run()
    for one in wire.orders:
        assert one.sampling_params.max_tokens is not None
        expected = expected_tokens(one.prompt_token_ids, one.sampling_params, one.sampling_params.max_tokens)
        output, given = wire.outputs[one.request_id], one.generated_token_ids
        assert output == expected[: len(output)]
        told = range(one.rescore_from or 0, len(output)) if len(output) > len(given) else ()
        assert wire.logprobs[one.request_id] == [made_up_logprobs(output[at], at, 2) for at in told]
        assert wire.prompt_logprobs[one.request_id] == bool(output and not given), "told once, with the first token"
        assert (one.request_id in wire.ends) == (output == expected)
        assert one.request_id in wire.ends or one.request_id in wire.left
    assert wire.nothing_is_held()


def test_a_request_whose_first_word_to_an_engine_is_lost_is_sent_again() -> None:
    """The engine tells what it holds only to those it has heard of."""
    tracker = RequestTracker(Registry())
    tracker.engine_up("e1", 0.0)
    (first,) = tracker.submit(order("a-0"), 0.0).send
    assert tracker.tick(FIRST_REPLY_TIMEOUT_S - 0.1).send == []
    (again,) = tracker.tick(FIRST_REPLY_TIMEOUT_S).send
    assert isinstance(first, Submit) and isinstance(again, Submit) and again.epoch == first.epoch + 1
    tracker.receive(
        "e1", HeldRequestsReport("e1", again.seq, 1, [HeldRequest("a-0", again.epoch, 0)]), FIRST_REPLY_TIMEOUT_S + 1
    )
    assert tracker.tick(10 * FIRST_REPLY_TIMEOUT_S).send == [], "it has said that it holds it"
