"""What each event of the worker means, on every wire."""

from collections.abc import Callable

import pytest

from onward.engine.request import Request, RequestStatus
from onward.proto.step import SlotAdvanced, SlotEvent, SlotFailed, SlotPreempted, SlotTokens
from tests.conformance.changes import drop, replace, request_of, until_preempting
from tests.conformance.conftest import Connect
from tests.conformance.wires import WiredHarness


def under_pressure(connect: Connect) -> WiredHarness:
    """A pool in which `low` has to give way to `high`."""
    harness = connect(num_blocks=8, block_size=4, max_num_seqs=2)
    harness.submit("low", [1] * 9, max_tokens=20, priority=5)
    harness.plan()
    harness.answer()
    harness.submit("high", [2] * 9, max_tokens=20)
    return harness


def test_a_slot_without_an_event_advances_nothing_and_answers_nothing(connect: Connect) -> None:
    harness = connect(num_blocks=8, block_size=4)
    client = harness.submit("a", [1] * 9)
    other = harness.submit("b", [2, 3])
    harness.plan()
    harness.answer(drop(harness, "a"))
    request = request_of(harness, "a")
    assert (request.num_computed, request.num_generated, request.status) == (0, 0, RequestStatus.RUNNING)
    assert request.num_hashed_blocks == 0, "a block that was not written is not cached"
    assert client.tokens == []
    assert len(other.tokens) == 1


def test_an_unfinished_chunk_moves_what_is_computed_and_yields_nothing(connect: Connect) -> None:
    harness = connect(max_num_seqs=4, max_num_batched_tokens=4, max_steps_in_flight=1)
    client = harness.submit("a", list(range(1, 12)))
    for computed in (4, 8):
        harness.plan()
        harness.answer()
        assert request_of(harness, "a").num_computed == computed
        assert client.tokens == []
        assert client.num_finishes == 0
    harness.plan()
    harness.answer()
    assert client.tokens == harness.expected(client)[:1]


def test_new_tokens_reach_the_client_at_their_position(connect: Connect) -> None:
    harness = connect()
    client = harness.submit("a", [1, 2, 3], max_tokens=20)
    harness.run_until_idle()
    assert client.tokens == harness.expected(client)


def test_several_tokens_in_one_event_are_all_taken(connect: Connect) -> None:
    harness = connect(max_steps_in_flight=1)
    client = harness.submit("a", [1, 2, 3], max_tokens=4)
    harness.plan()
    harness.answer(replace(harness, "a", lambda e: SlotTokens(e.slot, e.slot_epoch, 0, 3, [5, 0, 7, 0])))
    assert client.tokens == [5, 0, 7, 0]
    assert client.finish_reason == "length"


def test_how_many_were_drafted_is_counted_on_every_wire(connect: Connect) -> None:
    harness = connect(max_steps_in_flight=1)
    client = harness.submit("a", [1, 2, 3], max_tokens=9)
    harness.plan()
    said = lambda e: SlotTokens(e.slot, e.slot_epoch, 0, 3, [5, 6, 7], num_draft_tokens=4, draft_token_ids=[8, 9])  # noqa: E731
    harness.answer(replace(harness, "a", said))
    assert client.tokens == [5, 6, 7], "guesses take no position"
    assert harness.core.metrics.drafts.totals == (4, 2, 1)


def test_a_token_that_completes_its_grammar_ends_the_output_whatever_else_is_asked(connect: Connect) -> None:
    harness = connect(max_steps_in_flight=1)
    client, other = harness.submit("a", [1, 2, 3], max_tokens=20, min_tokens=9), harness.submit("b", [4, 5])
    harness.plan()
    harness.answer(replace(harness, "a", lambda e: SlotTokens(e.slot, e.slot_epoch, 0, 3, [5], None, None, True)))
    assert (client.tokens, client.finish_reason) == ([5], "stop")
    harness.run_until_idle()
    assert other.tokens == harness.expected(other)


def test_a_grammar_that_is_complete_at_the_last_token_ends_by_stop_and_not_by_length(connect: Connect) -> None:
    harness = connect(max_steps_in_flight=1)
    client = harness.submit("a", [1, 2, 3], max_tokens=2)
    harness.plan()
    harness.answer(replace(harness, "a", lambda e: SlotTokens(e.slot, e.slot_epoch, 0, 3, [5, 6], grammar_done=True)))
    assert (client.tokens, client.finish_reason) == ([5, 6], "stop")


def test_a_slot_that_could_not_draw_goes_on_in_the_next_step(connect: Connect) -> None:
    """With a second step in flight, which was planned for the token that did not come."""
    harness = connect(block_size=2)
    client = harness.submit("a", [1, 2, 3], max_tokens=8)
    harness.plan()
    harness.plan()
    harness.answer(replace(harness, "a", lambda e: SlotAdvanced(e.slot, e.slot_epoch, 2)))
    assert request_of(harness, "a").num_computed == 2
    assert client.tokens == []
    # The worker has drawn, and only its answer was changed; what it says of the second step is for another position.
    harness.answer(replace(harness, "a", lambda e: SlotTokens(e.slot, e.slot_epoch, 0, 3, [7])))
    assert client.tokens == [7]


def test_token_id_zero_survives(connect: Connect) -> None:
    harness = connect(vocab_size=1)
    client = harness.submit("a", [0, 0], max_tokens=6)
    harness.run_until_idle()
    assert client.tokens == [0] * 6


def test_the_reply_to_a_preempt_comes_in_that_step_also_when_nothing_runs(connect: Connect) -> None:
    harness = connect(num_blocks=8, block_size=4, max_num_seqs=2)
    harness.submit("low", [1] * 20, max_tokens=8, priority=5)
    harness.plan()
    harness.answer()
    harness.submit("high", [2] * 20, max_tokens=8)
    until_preempting(harness, "low")
    assert harness.plans[0].run == []
    harness.answer()
    assert request_of(harness, "low").status is RequestStatus.WAITING
    harness.run_until_idle()
    harness.check_all_exact()


def test_a_failure_ends_that_request_with_its_code_and_what_it_had(connect: Connect) -> None:
    harness = connect(max_steps_in_flight=1)
    bad, good = harness.submit("bad", [1, 2]), harness.submit("good", [3, 4])
    harness.plan()
    harness.answer()
    harness.plan()
    harness.answer(
        replace(harness, "bad", lambda e: SlotFailed(e.slot, e.slot_epoch, "invalid_logits", "not a number: ∞"))
    )
    assert (bad.finish_reason, bad.error_code) == ("error", "invalid_logits")
    assert bad.tokens == harness.expected(bad)[:1]
    harness.run_until_idle()
    assert good.tokens == harness.expected(good)
    harness.core.audit_idle()


@pytest.mark.parametrize(
    ("code", "status"), [("no_token_allowed", 400), ("grammar_failed", 400), ("invalid_logits", 500)]
)
def test_what_the_request_itself_makes_impossible_is_a_400(connect: Connect, code: str, status: int) -> None:
    harness = connect(max_steps_in_flight=1)
    bad = harness.submit("bad", [1, 2])
    harness.plan()
    harness.answer(replace(harness, "bad", lambda e: SlotFailed(e.slot, e.slot_epoch, code, "why")))
    assert bad.error is not None and (bad.error.code, bad.error.status) == (code, status)


INSTEAD_OF_A_REPLY: dict[str, Callable[[SlotEvent, Request], list[SlotEvent]]] = {
    "silence": lambda reply, low: [],
    "a chunk": lambda reply, low: [SlotAdvanced(reply.slot, reply.slot_epoch, low.num_computed)],
    "an old token": lambda reply, low: [SlotTokens(reply.slot, reply.slot_epoch, 0, 8, [0])],
    "an older reply": lambda reply, low: [SlotPreempted(reply.slot, reply.slot_epoch - 1, len(low.token_ids))],
}


@pytest.mark.parametrize("what", INSTEAD_OF_A_REPLY)
def test_nothing_but_its_own_reply_requeues_a_preempted_request(connect: Connect, what: str) -> None:
    harness = under_pressure(connect)
    until_preempting(harness, "low")
    low = request_of(harness, "low")

    def change(events: list[SlotEvent]) -> list[SlotEvent]:
        [reply] = [event for event in events if event.slot_epoch == low.slot_epoch]
        return [event for event in events if event is not reply] + INSTEAD_OF_A_REPLY[what](reply, low)

    harness.answer(change)
    assert low.status is RequestStatus.PREEMPTING
    assert low not in list(harness.core.scheduler.waiting)
    assert harness.metric("preemptions") == 0


def test_every_preempt_command_is_answered_by_its_own_event(connect: Connect) -> None:
    harness = under_pressure(connect)
    until_preempting(harness, "low")
    low = request_of(harness, "low")
    held = len(low.token_ids)
    replies: list[SlotEvent] = []

    def look(events: list[SlotEvent]) -> list[SlotEvent]:
        replies.extend(event for event in events if isinstance(event, SlotPreempted))
        return events

    harness.answer(look)
    assert replies == [
        SlotPreempted(harness.all_plans[-1].preempt[0].slot, harness.all_plans[-1].preempt[0].slot_epoch, held)
    ]
    assert low.status is RequestStatus.WAITING
