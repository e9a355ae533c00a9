"""An engine whose requests draft: the same outputs, more of them in a step, and nothing kept of what was wrong."""

import pytest

from onward.engine.request import DraftAcceptance, RequestStatus
from onward.engine.scheduling.scheduling_policy import STEP_OVERHEAD_ROWS, StepLoad, choose_num_drafts
from onward.proto.handoff import PrefillDone, PrefillRequest
from tests.engine.harness import Harness
from tests.engine.pd_cluster import Cluster
from tests.engine.test_scheduler_stats import fields

PROMPT = list(range(1, 12))


def drafts_of(harness: Harness) -> tuple[float, float, float]:
    return harness.core.metrics.drafts.totals


def test_outputs_equal_those_without_drafts_and_need_fewer_steps() -> None:
    def run(count: int) -> Harness:
        harness = Harness(num_draft_tokens=count)
        for i in range(3):
            harness.submit(f"r{i}", PROMPT[i:], max_tokens=40, seed=i, temperature=1.0, end=(5,), min_tokens=4 * i)
        harness.run_until_idle()
        harness.check_all_exact()
        return harness

    plain, drafting = run(0), run(4)
    assert [c.tokens for c in drafting.clients.values()] == [c.tokens for c in plain.clients.values()]
    assert len(drafting.all_plans) < len(plain.all_plans)
    drafted, accepted, verifications = drafts_of(drafting)
    assert 0 < accepted < drafted and verifications
    assert drafts_of(plain) == (0, 0, 0)
    drafting.core.audit_idle()


def test_a_request_says_how_many_it_wants_within_what_the_instance_does() -> None:
    for wanted, allowed in ((0, 0), (1, 1), (99, 3), (None, 3)):
        harness = Harness(num_draft_tokens=3)
        harness.submit("r", PROMPT, max_tokens=30, max_draft_tokens=wanted)
        harness.run_until_idle()
        assert max(run.max_draft_tokens for plan in harness.all_plans for run in plan.run) == allowed


def test_no_draft_lies_beyond_the_longest_output() -> None:
    harness = Harness(num_draft_tokens=7)
    client = harness.submit("r", PROMPT, max_tokens=9)
    while (plan := harness.plan()) is not None or harness.plans:
        if plan is None:
            harness.answer()
        for request in harness.core._live.values():
            assert request.planned_len - request.num_prompt <= 9
    assert len(client.tokens) == 9
    harness.check_all_exact()


def test_a_stop_inside_an_accepted_run_cuts_what_follows() -> None:
    harness = Harness(num_draft_tokens=4)
    client = harness.submit("r", PROMPT, max_tokens=30)
    harness.run_until_idle()
    tokens = client.tokens
    for end in sorted(set(tokens)):
        again = harness.submit(f"r{end}", PROMPT, max_tokens=30, end=(end,))
        harness.run_until_idle()
        assert again.tokens == tokens[: tokens.index(end) + 1]
        assert again.finish_reason == "stop"
    harness.check_all_exact()
    harness.core.audit_idle()


def test_no_request_is_preempted_for_a_draft() -> None:
    for count in (0, 6):
        harness = Harness(num_blocks=12, num_draft_tokens=count)
        for i in range(3):
            harness.submit(f"r{i}", PROMPT[:4], max_tokens=8, seed=i, temperature=1.0)
        harness.run_until_idle()
        harness.check_all_exact()
        assert harness.core.metrics.preemptions.value() == 0


def test_a_request_whose_drafts_may_have_used_up_its_blocks_waits_for_the_result() -> None:
    harness = Harness(num_blocks=5, block_size=4, num_draft_tokens=6, max_num_seqs=2)
    first = harness.submit("first", [1, 2, 3], max_tokens=16)
    harness.run_until_idle()
    assert len(first.tokens) == 16
    harness.check_all_exact()
    assert harness.core.metrics.preemptions.value() == 0, "it was alone, and never short of what it needs"


def test_preempted_in_mid_draft_it_goes_on_as_if_nothing_had_happened() -> None:
    harness = Harness(num_blocks=14, num_draft_tokens=4)
    clients = [harness.submit(f"r{i}", PROMPT[:5], max_tokens=24, seed=i, temperature=1.0) for i in range(3)]
    harness.run_until_idle()
    assert harness.core.metrics.preemptions.value() > 0
    assert [len(client.tokens) for client in clients] == [24] * 3
    harness.check_all_exact()


def test_a_crash_in_mid_draft_costs_no_token_and_doubles_none() -> None:
    harness = Harness(num_draft_tokens=4)
    clients = [harness.submit(f"r{i}", PROMPT, max_tokens=30, seed=i, temperature=1.0) for i in range(3)]
    for crash in (harness.crash_worker, harness.crash_engine, harness.crash_worker):
        for _ in range(4):
            while harness.plan() is not None:
                pass
            harness.answer()
        crash()
    harness.run_until_idle()
    assert [len(client.tokens) for client in clients] == [30] * 3
    harness.check_all_exact()


def test_an_abort_in_mid_draft_frees_everything_behind_its_fence() -> None:
    harness = Harness(num_draft_tokens=4)
    harness.submit("r", PROMPT, max_tokens=30)
    for _ in range(3):
        while harness.plan() is not None:
            pass
        harness.answer()
    while harness.plan() is not None:
        pass
    harness.abort("r")
    harness.run_until_idle()
    harness.core.audit_idle()


def test_the_cache_has_what_was_accepted_and_nothing_that_was_wrong() -> None:
    harness = Harness(num_draft_tokens=5, block_size=4)
    first = harness.submit("first", PROMPT, max_tokens=30)
    harness.run_until_idle()
    again = harness.submit("again", [*PROMPT, *first.tokens[:25]], max_tokens=5)
    harness.run_until_idle()
    assert again.cached == (len(PROMPT) + 25 - 1) // 4 * 4, "all but the last token, whose logits are needed"
    harness.check_all_exact()


def test_the_prefill_side_sends_its_drafts_and_the_decode_side_verifies_them_first() -> None:
    cluster = Cluster(num_draft_tokens=4, prefill={"num_draft_tokens": 3})
    for i in range(6):
        cluster.submit(f"r{i}", list(range(1, 3 + 5 * i)), max_tokens=12, seed=i, temperature=1.0)
    cluster.settle()
    cluster.decode.check_all_exact()
    assert {m.max_draft_tokens for m in cluster.seen if isinstance(m, PrefillRequest)} == {4}
    given = [m.draft_token_ids for m in cluster.seen if isinstance(m, PrefillDone) and m.draft_token_ids]
    assert given and all(len(one) <= 3 for one in given)
    assigned = [a.draft_token_ids for plan in cluster.decode.all_plans for a in plan.assign if a.draft_token_ids]
    assert {tuple(one) for one in assigned} == {tuple(one) for one in given}
    cluster.settle(seconds=1.0)
    cluster.check_idle()


def test_a_peer_s_drafts_are_verified_also_where_drafting_would_not_pay() -> None:
    cluster = Cluster(num_draft_tokens=4, prefill={"num_draft_tokens": 4})
    cluster.decode.core.scheduler.draft_cost = 9.0
    for i in range(6):
        cluster.submit(f"r{i}", list(range(1, 3 + 5 * i)), max_tokens=12, seed=i, temperature=1.0)
        cluster.settle()
    cluster.decode.check_all_exact()
    runs = {(run.slot_epoch, plan.step): run for plan in cluster.decode.all_plans for run in plan.run}
    begun = [
        (runs.pop((assign.slot_epoch, plan.step)).max_draft_tokens, len(assign.draft_token_ids))
        for plan in cluster.decode.all_plans
        for assign in plan.assign
    ]
    assert max(begun)[0] > 1 and all(num_drafts <= given for num_drafts, given in begun)
    assert not any(run.max_draft_tokens for run in runs.values()), "what it would have to guess itself is too dear"


@pytest.mark.parametrize("which", ["decode", "prefill"])
def test_where_only_one_side_drafts_the_other_is_not_disturbed(which: str) -> None:
    drafting = {"num_draft_tokens": 4}
    cluster = Cluster(prefill=drafting) if which == "prefill" else Cluster(**drafting)
    cluster.submit("r", list(range(1, 20)), max_tokens=12)
    cluster.settle()
    cluster.decode.check_all_exact()
    cluster.settle(seconds=1.0)
    cluster.check_idle()


def test_the_request_s_line_and_the_scheduler_s_tell_how_drafts_fare(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    harness = Harness(num_draft_tokens=4)
    harness.tick(0.0)
    harness.submit("r", PROMPT, max_tokens=40)
    harness.run_until_idle()
    harness.tick(6.0)
    drafted, accepted, verifications = drafts_of(harness)
    for begin in ("request finished", "scheduler"):
        [line] = [fields(r.message) for r in caplog.records if r.message.startswith(begin)][-1:]
        assert (line["drafted"], line["accepted"]) == (str(int(drafted)), str(int(accepted)))
        assert line["acceptance"] == f"{accepted / drafted:.1%}"
        assert line["mean_length"] == f"{1 + accepted / verifications:.2f}"


def test_counters_tell_each_place_behind_the_newest_token_apart() -> None:
    harness = Harness(num_draft_tokens=4)
    harness.submit("r", PROMPT, max_tokens=60)
    harness.run_until_idle()
    figures = harness.core.metrics.drafts
    drafted = [figures._drafted.value(str(place)) for place in (1, 2, 3, 4)]
    accepted = [figures._accepted.value(str(place)) for place in (1, 2, 3, 4)]
    assert drafted == sorted(drafted, reverse=True) and accepted == sorted(accepted, reverse=True)
    assert all(a <= d for a, d in zip(accepted, drafted, strict=True))
    assert sum(accepted) == drafts_of(harness)[1] > 0


def record(num_right: int, num_wrong: int) -> DraftAcceptance:
    made = DraftAcceptance()
    for _ in range(num_wrong):
        made.record(1, 0)
    for _ in range(num_right):
        made.record(4, 4)
    return made


def test_the_more_drafts_are_right_the_more_are_made() -> None:
    alone = StepLoad(1, 100)
    counts = [choose_num_drafts(4, record(right, 10), alone) for right in (0, 1, 10)]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 4


def test_the_fuller_a_step_the_fewer_drafts_are_made() -> None:
    counts = [choose_num_drafts(4, record(3, 1), StepLoad(rows, 1000)) for rows in (1, 4, 8, 32, 190)]
    assert counts == sorted(counts, reverse=True) and counts[0] == 4 and counts[-1] == 0


def test_drafts_take_only_rows_that_are_left() -> None:
    assert choose_num_drafts(4, record(9, 0), StepLoad(1, 2)) == 2
    assert choose_num_drafts(4, record(9, 0), StepLoad(1, 0)) == 0


def test_a_draft_that_costs_more_must_be_right_more_often() -> None:
    break_even = 1 / (1 + STEP_OVERHEAD_ROWS)
    made = record(0, 2)
    assert choose_num_drafts(1, made, StepLoad(1, 9)) == int(made.acceptance_rate > break_even)
    assert choose_num_drafts(4, record(9, 0), StepLoad(1, 9, draft_cost=10.0)) == 0


def test_drafts_that_are_there_cost_no_drafting_and_are_all_there_are() -> None:
    dear = StepLoad(1, 9, draft_cost=10.0)
    assert choose_num_drafts(4, record(9, 0), dear, num_given=3) == 3
    assert choose_num_drafts(2, record(9, 0), dear, num_given=3) == 2
    assert choose_num_drafts(4, record(0, 20), dear, num_given=3) == 0, "verifying them costs rows"


def test_who_has_given_up_tries_again_after_a_rest() -> None:
    made = record(0, 20)
    assert choose_num_drafts(4, made, StepLoad(1, 9)) == 0
    for _ in range(100):
        made.record(0, 0)
    assert choose_num_drafts(4, made, StepLoad(1, 9)) > 0
    assert choose_num_drafts(4, made, StepLoad(190, 9)) == 0, "there is nothing to win"


def test_a_prompt_that_waits_comes_before_drafts() -> None:
    harness = Harness(num_draft_tokens=4, max_num_batched_tokens=8, max_num_seqs=4)
    harness.submit("r", PROMPT, max_tokens=60)
    for _ in range(6):
        while harness.plan() is not None:
            pass
        harness.answer()
    harness.submit("long", list(range(1, 30)), max_tokens=2)
    plan = harness.plan() or (harness.answer() or harness.plan())
    assert plan is not None
    assert sum(run.num_tokens for run in plan.run) == 8, "the step is full of what must be computed"
    assert not any(run.max_draft_tokens for run in plan.run)
    harness.run_until_idle()
    assert all(r.status is RequestStatus.FINISHED for r in harness.core._live.values())


def test_while_the_next_in_line_waits_for_blocks_the_others_go_on_drafting() -> None:
    """It has a slot, but no prompt will fill the step."""
    harness = Harness(num_blocks=16, block_size=4, num_draft_tokens=4)
    harness.submit("running", PROMPT, max_tokens=50)
    while harness.plan() is not None:
        pass
    harness.answer()
    waiting = harness.submit("waiting", list(range(60, 10, -1)), max_tokens=4)
    before = len(harness.all_plans)
    while not waiting.tokens:
        while harness.plan() is not None:
            pass
        harness.answer()
    meanwhile = [run.max_draft_tokens for plan in harness.all_plans[before:] if not plan.assign for run in plan.run]
    assert sum(meanwhile) > len(meanwhile), "alone in its step, it guesses one token and more"
    harness.run_until_idle()
    harness.check_all_exact()
    harness.core.audit_idle()
