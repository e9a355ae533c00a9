"""The stages that an event runs through, in their order, on every wire."""

import logging

import msgspec
import pytest

from onward.engine.request import RequestStatus
from onward.proto.engine import FromEngine, HeldRequestsReport, TokenDelta, TokenDeltas
from onward.proto.step import SlotAdvanced, SlotEvent, SlotFailed, SlotPreempted, SlotTokens, TokenLogprobs
from onward.sim.hash_worker import expected_logprobs
from tests.conformance.changes import replace, request_of, until_preempting
from tests.conformance.conftest import Connect
from tests.conformance.wires import WiredHarness

UNKNOWN_EPOCH = 10_000


def messages(harness: WiredHarness) -> list[FromEngine]:
    decoder = msgspec.msgpack.Decoder(FromEngine)
    return [decoder.decode(sent) for sent in harness.sent]


def deltas(harness: WiredHarness, request_id: str) -> list[TokenDelta]:
    sent = [delta for message in messages(harness) if isinstance(message, TokenDeltas) for delta in message.deltas]
    return [delta for delta in sent if delta.request_id == request_id]


def observations(harness: WiredHarness, histogram: str) -> tuple[int, float]:
    """How many, and their sum."""
    [series] = getattr(harness.core.metrics, histogram).family().series
    return sum(series.buckets), series.sum


def one_step(harness: WiredHarness) -> None:
    harness.plan()
    harness.answer()


@pytest.mark.parametrize(
    "stray",
    [
        SlotAdvanced(3, UNKNOWN_EPOCH, 1),
        SlotTokens(3, UNKNOWN_EPOCH, 0, 1, [5]),
        SlotPreempted(3, UNKNOWN_EPOCH, 1),
        SlotFailed(3, UNKNOWN_EPOCH, "kv_lost", "m"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_an_event_of_an_unknown_epoch_is_dropped_and_counted_and_is_no_error(
    connect: Connect, stray: SlotEvent
) -> None:
    harness = connect()
    client = harness.submit("a", [1, 2])
    harness.plan()
    harness.answer(lambda events: [*events, stray])
    assert harness.metric("stale", type(stray).__name__.removeprefix("Slot").lower()) == 1
    assert harness.metric("isolated_errors") == 0
    harness.run_until_idle()
    assert client.tokens == harness.expected(client)


def test_an_event_of_an_epoch_that_is_over_never_reaches_the_slot_s_next_tenant(connect: Connect) -> None:
    harness = connect(max_num_seqs=1, max_steps_in_flight=1)
    harness.submit("old", [1, 2])
    one_step(harness)
    old_epoch = request_of(harness, "old").slot_epoch
    harness.abort("old")
    new = harness.submit("new", [3, 4])
    harness.plan()
    slot = request_of(harness, "new").slot
    assert slot is not None
    harness.answer(lambda events: [SlotTokens(slot, old_epoch, 0, 2, [9])])
    assert new.tokens == []
    assert harness.metric("stale", "tokens") == 1


def test_a_preempted_request_waits_again_with_a_list_that_no_longer_changes(connect: Connect) -> None:
    harness = connect(num_blocks=8, block_size=4, max_num_seqs=2)
    client = harness.submit("low", [1] * 9, max_tokens=20, priority=5)
    one_step(harness)
    harness.submit("high", [2] * 9, max_tokens=20)
    until_preempting(harness, "low")
    harness.answer()
    low = request_of(harness, "low")
    assert low.status is RequestStatus.WAITING
    assert low.token_ids == [1] * 9 + client.tokens
    assert (low.slot, low.block_ids, low.num_computed) == (None, [], 0)
    harness.run_until_idle()
    harness.check_all_exact()


def test_an_abort_of_a_request_that_is_being_preempted_is_answered_at_once_and_the_reply_is_stale(
    connect: Connect,
) -> None:
    harness = connect(num_blocks=8, block_size=4, max_num_seqs=2)
    client = harness.submit("low", [1] * 9, max_tokens=20, priority=5)
    one_step(harness)
    harness.submit("high", [2] * 9, max_tokens=20)
    until_preempting(harness, "low")
    harness.abort("low")
    assert client.finish_reason == "abort"
    harness.answer()
    assert harness.metric("stale", "preempted") == 1
    assert "low" not in harness.core._live
    harness.run_until_idle()
    harness.core.audit_idle()


def test_a_request_that_finishes_while_it_is_being_preempted_is_finished_and_never_requeued(connect: Connect) -> None:
    harness = connect(num_blocks=8, block_size=4, max_num_seqs=1)
    low = harness.submit("low", [1] * 4, max_tokens=2, priority=5)
    one_step(harness)
    harness.plan()
    harness.submit("high", [2] * 4, max_tokens=3)
    preempting = harness.plan()
    assert preempting is not None
    assert len(preempting.preempt) == 1
    harness.answer()
    assert low.finish_reason == "length"
    harness.answer()
    assert harness.metric("stale", "preempted") == 1
    assert "low" not in harness.core._live
    harness.run_until_idle()
    harness.check_all_exact()
    harness.core.audit_idle()


def test_after_a_failure_the_blocks_of_that_step_get_no_name(connect: Connect) -> None:
    harness = connect(block_size=4)
    harness.submit("bad", list(range(1, 14)))
    harness.plan()
    harness.answer(replace(harness, "bad", lambda e: SlotFailed(e.slot, e.slot_epoch, "invalid_logits", "")))
    again = harness.submit("again", list(range(1, 14)))
    harness.run_until_idle()
    assert again.cached == 0
    assert again.tokens == harness.expected(again)


def test_a_prompt_in_chunks_gives_the_tokens_of_a_prompt_in_one(connect: Connect) -> None:
    harness = connect(max_num_seqs=2, max_num_batched_tokens=3)
    client = harness.submit("a", list(range(1, 30)))
    harness.submit("b", list(range(5, 25)), seed=3, temperature=1.0)
    harness.run_until_idle()
    harness.check_all_exact()
    assert deltas(harness, "a")[0].position == 0
    assert len(deltas(harness, "a")) == len(client.tokens)


def test_a_chunk_s_blocks_are_shared_as_soon_as_they_are_computed_and_not_before(connect: Connect) -> None:
    harness = connect(block_size=4, max_num_seqs=4, max_num_batched_tokens=8, max_steps_in_flight=1)
    harness.submit("a", list(range(1, 20)))
    request = request_of(harness, "a")
    harness.plan()
    assert request.num_hashed_blocks == 0
    harness.answer()
    assert request.num_hashed_blocks == 2


def test_a_token_that_was_taken_before_is_dropped_and_counted(connect: Connect) -> None:
    harness = connect(max_steps_in_flight=1)
    client = harness.submit("a", [1, 2], max_tokens=5)
    one_step(harness)
    harness.plan()
    harness.answer(replace(harness, "a", lambda e: SlotTokens(e.slot, e.slot_epoch, 0, 2, list(client.tokens))))
    assert harness.metric("stale", "position") == 1
    assert len(client.tokens) == 1


def test_a_gap_fails_that_request_and_never_reaches_the_client(connect: Connect) -> None:
    harness = connect()
    bad, good = harness.submit("bad", [1, 2]), harness.submit("good", [3, 4])
    harness.plan()
    harness.answer(replace(harness, "bad", lambda e: SlotTokens(e.slot, e.slot_epoch, 3, 2, [7])))
    assert (bad.tokens, bad.error_code) == ([], "internal_error")
    harness.run_until_idle()
    assert good.tokens == harness.expected(good)


def test_the_token_that_ends_the_output_is_in_the_history_and_in_the_delta(connect: Connect) -> None:
    harness = connect(vocab_size=4)
    client = harness.submit("a", [1, 2, 3], max_tokens=50, end=(2,))
    harness.run_until_idle()
    assert client.finish_reason == "stop"
    assert client.tokens[-1] == 2
    assert deltas(harness, "a")[-1].token_ids == [2]


def test_an_end_token_before_min_tokens_does_not_end_the_output(connect: Connect) -> None:
    harness = connect(max_steps_in_flight=1)
    client = harness.submit("a", [1, 2], max_tokens=9, end=(7,), min_tokens=2)
    harness.plan()
    harness.answer(replace(harness, "a", lambda e: SlotTokens(e.slot, e.slot_epoch, 0, 2, [7])))
    assert (client.tokens, client.finish_reason) == ([7], None)


def test_max_tokens_counts_the_tokens_of_earlier_attempts(connect: Connect) -> None:
    harness = connect()
    whole = harness.submit("whole", [1, 2], max_tokens=9)
    harness.run_until_idle()
    rest = harness.submit("rest", [1, 2], max_tokens=9, generated=whole.tokens[:4], epoch=2)
    harness.run_until_idle()
    assert (rest.tokens, rest.finish_reason) == (whole.tokens, "length")


def test_the_model_s_length_ends_the_output(connect: Connect) -> None:
    harness = connect(max_model_len=12)
    client = harness.submit("a", [1, 2], max_tokens=None)
    harness.run_until_idle()
    assert (len(client.tokens), client.finish_reason) == (10, "length")


def test_tokens_behind_the_stop_in_the_same_event_are_cut_with_their_logprobs(connect: Connect) -> None:
    harness = connect(max_steps_in_flight=1)
    client = harness.submit("a", [1, 2], max_tokens=9, end=(7,), logprobs=0)
    said = [TokenLogprobs(-0.5, 1), TokenLogprobs(-0.25, 2), TokenLogprobs(-0.125, 3)]
    harness.plan()
    harness.answer(replace(harness, "a", lambda e: SlotTokens(e.slot, e.slot_epoch, 0, 2, [4, 7, 5], said)))
    assert (client.tokens, client.finish_reason) == ([4, 7], "stop")
    assert deltas(harness, "a")[-1].logprobs == said[:2]
    harness.run_until_idle()
    harness.core.audit_idle()


def test_the_stop_comes_before_the_length_when_both_are_reached_at_once(connect: Connect) -> None:
    harness = connect(max_steps_in_flight=1)
    client = harness.submit("a", [1, 2], max_tokens=1, end=(7,))
    harness.plan()
    harness.answer(replace(harness, "a", lambda e: SlotTokens(e.slot, e.slot_epoch, 0, 2, [7])))
    assert client.finish_reason == "stop"


def test_a_stop_string_ends_the_request_with_that_reason_and_cuts_the_list(connect: Connect) -> None:
    harness = connect()
    client = harness.submit("a", [1, 2], max_tokens=9)
    for _ in range(3):
        one_step(harness)
    harness.stop(client, 2)
    assert harness.metric("finished", "stop") == 1
    assert harness.metric("finished", "abort") == 0
    harness.run_until_idle()
    harness.core.audit_idle()


def test_every_token_brings_its_own_logprobs(connect: Connect) -> None:
    harness = connect()
    client = harness.submit("a", [1, 2, 3], max_tokens=12, logprobs=3)
    plain = harness.submit("b", [1, 2, 3], max_tokens=12)
    harness.run_until_idle()
    told = [one for delta in deltas(harness, "a") for one in delta.logprobs or []]
    assert told == [expected_logprobs(token, 3) for token in client.tokens]
    assert all(delta.logprobs is None for delta in deltas(harness, "b"))
    assert plain.tokens == client.tokens


def test_the_prompt_s_logprobs_come_whole_with_the_first_delta_and_once(connect: Connect) -> None:
    harness = connect(max_num_seqs=2, max_num_batched_tokens=4)
    prompt = list(range(1, 15))
    harness.submit("warm", prompt)
    harness.run_until_idle()
    harness.submit("a", prompt, prompt_logprobs=1)
    harness.run_until_idle()
    first, *others = deltas(harness, "a")
    assert first.prompt_logprobs == [expected_logprobs(token, 1) for token in prompt[1:]]
    assert all(delta.prompt_logprobs is None for delta in others)
    assert first.num_cached_tokens == 0, "what is cached has no logits"


def test_a_request_preempted_in_its_prompt_still_brings_each_prompt_logprob_once(connect: Connect) -> None:
    harness = connect(num_blocks=10, block_size=4, max_num_seqs=2, max_num_batched_tokens=4)
    prompt = list(range(1, 21))
    harness.submit("low", prompt, max_tokens=4, priority=5, prompt_logprobs=0)
    one_step(harness)
    one_step(harness)
    harness.submit("high", [9] * 20, max_tokens=12)
    harness.run_until_idle()
    assert harness.metric("preemptions") > 0
    assert deltas(harness, "low")[0].prompt_logprobs == [expected_logprobs(token, 0) for token in prompt[1:]]
    harness.check_all_exact()


def test_the_first_token_is_timed_from_scheduling_and_from_arrival_and_later_ones_from_each_other(
    connect: Connect,
) -> None:
    harness = connect(max_steps_in_flight=1)
    harness.submit("a", [1, 2, 3], max_tokens=3)
    harness.now_s += 2.0
    harness.plan()
    harness.now_s += 0.5
    harness.answer()
    assert observations(harness, "queue_time") == (1, pytest.approx(2.0))
    assert observations(harness, "prefill_time") == (1, pytest.approx(0.51))
    assert observations(harness, "time_to_first_token") == (1, pytest.approx(2.51))
    assert observations(harness, "inter_token")[0] == 0
    harness.run_until_idle()
    assert observations(harness, "prefill_time")[0] == 1
    assert observations(harness, "inter_token") == (2, pytest.approx(0.02))


def test_tokens_are_counted_by_kind_and_steps_by_their_time(connect: Connect) -> None:
    harness = connect(block_size=4)
    harness.submit("a", list(range(1, 11)), max_tokens=3)
    harness.run_until_idle()
    harness.submit("b", list(range(1, 11)), max_tokens=5)
    harness.run_until_idle()
    kinds = {kind: harness.metric("tokens", kind) for kind in ("prompt", "cached", "generated")}
    assert kinds == {"prompt": 20, "cached": 8, "generated": 8}
    steps = len(harness.all_plans)
    assert observations(harness, "step_time") == (steps, steps * 0.125)


def test_a_resumed_request_s_first_token_is_not_counted_again(connect: Connect) -> None:
    harness = connect()
    harness.submit("a", [1, 2, 3], max_tokens=6, generated=[5, 6], epoch=2)
    harness.run_until_idle()
    assert observations(harness, "prefill_time")[0] == observations(harness, "time_to_first_token")[0] == 0
    assert harness.metric("tokens", "prompt") == 0
    assert harness.metric("tokens", "generated") == 4


@pytest.mark.parametrize(("output_caching", "reused"), [(True, 24), (False, 12)])
def test_full_blocks_of_the_output_are_cached_where_that_is_on(
    connect: Connect, output_caching: bool, reused: int
) -> None:
    harness = connect(block_size=4, output_caching=output_caching)
    prompt = list(range(1, 14))
    first = harness.submit("a", prompt, max_tokens=12)
    harness.run_until_idle()
    second = harness.submit("b", [*prompt, *first.tokens, 60], max_tokens=4)
    harness.run_until_idle()
    # The KV of the last generated token was never computed: 24 of 25 tokens, and none of the output where it is off.
    assert second.cached == reused
    harness.check_all_exact()


def test_nothing_is_cached_where_prefix_caching_is_off(connect: Connect) -> None:
    harness = connect(block_size=4, prefix_caching=False)
    for name in ("a", "b"):
        assert harness.submit(name, list(range(1, 14)), max_tokens=4) is not None
        harness.run_until_idle()
    assert {one.cached for one in harness.clients.values()} == {0}
    harness.check_all_exact()


def test_a_block_is_cached_when_its_last_token_is_computed_and_not_when_it_is_sampled(connect: Connect) -> None:
    harness = connect(block_size=4, max_steps_in_flight=1)
    harness.submit("a", [1, 2, 3], max_tokens=9)
    one_step(harness)
    request = request_of(harness, "a")
    assert (len(request.token_ids), request.num_computed, request.num_hashed_blocks) == (4, 3, 0)
    one_step(harness)
    assert (request.num_computed, request.num_hashed_blocks) == (4, 1)


def test_every_delta_carries_its_place_the_prompt_s_length_and_what_was_cached(connect: Connect) -> None:
    harness = connect(block_size=4)
    harness.submit("warm", list(range(1, 11)), max_tokens=2)
    harness.run_until_idle()
    client = harness.submit("a", list(range(1, 11)), max_tokens=5, epoch=3)
    harness.run_until_idle()
    said = deltas(harness, "a")
    assert [delta.position for delta in said] == list(range(5))
    assert [delta.token_ids for delta in said] == [[token] for token in client.tokens]
    assert {(d.request_id, d.epoch, d.num_prompt_tokens, d.num_cached_tokens) for d in said} == {("a", 3, 10, 8)}
    assert [delta.finish_reason for delta in said] == [None] * 4 + ["length"]
    assert all(delta.error is None for delta in said)


def test_all_deltas_of_a_step_go_out_in_one_message(connect: Connect) -> None:
    harness = connect()
    for name in ("a", "b", "c"):
        harness.submit(name, [1, 2], max_tokens=3)
    harness.plan()
    harness.sent.clear()
    harness.answer()
    [message] = messages(harness)
    assert isinstance(message, TokenDeltas)
    assert message.step == 1
    assert [delta.request_id for delta in message.deltas] == ["a", "b", "c"]


def test_the_end_is_published_before_the_request_is_forgotten(connect: Connect) -> None:
    harness = connect()
    harness.submit("a", [1, 2], max_tokens=1)
    harness.tick(0.5)
    harness.plan()
    harness.sent.clear()
    harness.now_s = 2.0
    harness.core.commit(harness._result(), harness.now_s)
    assert "a" not in harness.core._live
    harness.core.tick(harness.now_s)
    harness.deliver()
    said = messages(harness)
    assert [type(message) for message in said] == [TokenDeltas, HeldRequestsReport]
    assert deltas(harness, "a")[-1].finish_reason == "length"


def test_a_finished_request_gives_everything_back_behind_its_fence(connect: Connect) -> None:
    harness = connect(vocab_size=4)
    client = harness.submit("a", [1] * 9, max_tokens=50, end=(0, 1, 2, 3))
    harness.plan()
    harness.plan()
    harness.answer()
    assert client.finish_reason == "stop"
    pool, slots = harness.core.scheduler.pool, harness.core.scheduler.slots
    assert (pool.num_fenced, slots.num_fenced) == (3, 1)
    harness.answer()
    assert (pool.num_fenced, slots.num_fenced) == (0, 0)
    harness.core.audit_idle()


def test_a_finished_request_is_counted_once_and_leaves_one_log_line(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    harness = connect()
    with caplog.at_level(logging.INFO, logger="onward"):
        harness.submit("the-only-one", [1, 2], max_tokens=3)
        harness.run_until_idle()
    lines = [record.getMessage() for record in caplog.records if "request finished" in record.getMessage()]
    assert len(lines) == 1
    assert "the-only-one" in lines[0]
    assert "length" in lines[0]
    assert harness.metric("finished", "length") == 1


def test_a_committed_step_is_a_sign_of_life(connect: Connect) -> None:
    harness = connect()
    harness.submit("a", [1, 2], max_tokens=5)
    one_step(harness)
    assert harness.core.stats(harness.now_s + 3).stalled_s == pytest.approx(3)
    one_step(harness)
    assert harness.core.stats(harness.now_s).stalled_s == 0
    assert harness.core.stats(harness.now_s).step == 2
    harness.run_until_idle()
    assert harness.core.stats(harness.now_s + 99).stalled_s == 0, "nothing is due when idle"
