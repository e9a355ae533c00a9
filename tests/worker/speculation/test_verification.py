"""Whatever is drafted, a slot draws what it would have drawn without: the same tokens, logprobs and ends."""

import msgspec
import numpy as np
import pytest

from onward.proto.sampling_params import SamplingParams
from onward.proto.step import PreemptSlot, RunSlot, SlotFailed, SlotPreempted, SlotTokens
from tests.worker import small_int8
from tests.worker.driver import GREEDY, Driver
from tests.worker.speculation.drafted import generate, output, tokens_of
from tests.worker.speculation.proposers import Guess, Injected, knowing, right_until

PROMPT = [5, 9, 11, 2, 60, 33, 8]
LENGTH = 24
VOCAB = small_int8.CONFIG.vocab_size
SEEDED = SamplingParams(seed=11, temperature=1.2, top_k=40, top_p=0.95)
RULED = SamplingParams(
    seed=3, temperature=0.9, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.2, logprobs=2,
    logit_bias=((3, 2.0),), bad_words=((4,), (3, 3)),
)  # fmt: skip
ALLOWED = SamplingParams(seed=3, temperature=1.1, logprobs=2, allowed_token_ids=(2, 3, 5, 7, 11, 13))


def plain(sampling: SamplingParams, prompt: list[int] = PROMPT, num_tokens: int = LENGTH) -> list[SlotTokens]:
    return output(small_int8.driver(), prompt, sampling, num_tokens, num_drafts=0)


def drafting(guess: Guess, **settings: int) -> tuple[Driver, Injected]:
    drafter = Injected(guess)
    return small_int8.driver(drafter=drafter, **settings), drafter


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, RULED, ALLOWED], ids=["greedy", "seeded", "ruled", "allowed"])
@pytest.mark.parametrize("wrong_at", [0, 1, 3, 99])
def test_outputs_equal_those_without_drafts_however_many_of_them_are_right(
    sampling: SamplingParams, wrong_at: int
) -> None:
    expected = plain(sampling)
    driver, drafter = drafting(right_until({0: tokens_of(expected)}, wrong_at, VOCAB))
    events = output(driver, PROMPT, sampling, LENGTH)
    assert tokens_of(events) == tokens_of(expected)
    told = [one for event in events for one in event.logprobs or []]
    assert told == [one for event in expected for one in event.logprobs or []]
    assert all(len(event.token_ids) <= wrong_at + 1 for event in events)
    if wrong_at == 99:
        assert len(events) == -(-LENGTH // 5), "what is right is taken, five tokens a step"
    assert drafter.num_drafted == sum(event.num_draft_tokens for event in events)


def test_slots_of_one_step_follow_their_own_drafts() -> None:
    requests = {0: (PROMPT, GREEDY), 3: ([7, 7, 1], SEEDED), 5: ([40, 2, 2, 9, 1], RULED)}
    expected = {slot: tokens_of(plain(sampling, prompt)) for slot, (prompt, sampling) in requests.items()}
    depths = {0: 99, 3: 2, 5: 1}

    def guess(draft_request, tokens):
        return right_until(expected, depths[draft_request.slot], VOCAB)(draft_request, tokens)

    driver, _ = drafting(guess)
    assigns = [driver.assign(slot, p, room=LENGTH + 1, sampling=s) for slot, (p, s) in requests.items()]
    events = generate(driver, assigns, LENGTH, 4)
    assert [tokens_of(one) for one in events] == list(expected.values())


def test_logits_behind_accepted_drafts_are_bit_equal_to_those_of_single_rows() -> None:
    expected = plain(msgspec.structs.replace(GREEDY, logprobs=5))
    driver, _ = drafting(knowing({0: tokens_of(expected)}))
    events = output(driver, PROMPT, msgspec.structs.replace(GREEDY, logprobs=5), LENGTH)
    assert [one for e in events for one in e.logprobs or []] == [one for e in expected for one in e.logprobs or []]


@pytest.mark.parametrize("place", [0, 1, 2, 4])
def test_a_chain_ends_with_a_token_that_ends_the_output(place: int) -> None:
    tokens = tokens_of(plain(SEEDED))
    end = next(token for token in tokens[place:] if tokens.index(token) >= place)
    at = tokens.index(end)
    driver, _ = drafting(knowing({0: tokens}))
    events = output(driver, PROMPT, msgspec.structs.replace(SEEDED, end_token_ids=(end,)), at + 1)
    assert tokens_of(events) == tokens[: at + 1]
    assert all(end not in event.token_ids[:-1] for event in events), "nothing is drawn behind it"


def test_no_end_token_is_sampled_before_min_tokens_among_drafts() -> None:
    free = tokens_of(plain(GREEDY))
    sampling = msgspec.structs.replace(GREEDY, end_token_ids=(free[2],), min_tokens=9)
    expected = tokens_of(plain(sampling))
    assert free[2] not in expected[:9]
    driver, _ = drafting(knowing({0: free}))  # drafts that would end too early
    assert tokens_of(output(driver, PROMPT, sampling, LENGTH)) == expected


def test_a_chain_is_not_longer_than_the_output_may_be() -> None:
    tokens = tokens_of(plain(GREEDY))
    driver, _ = drafting(knowing({0: tokens}))
    request = driver.assign(0, PROMPT, room=20, sampling=msgspec.structs.replace(GREEDY, max_tokens=3))
    driver.step(assign=[request], run=[RunSlot(0, request.slot_epoch, 6)])
    [event] = driver.step(run=[RunSlot(0, request.slot_epoch, 1, [], 4)])
    assert event.token_ids == tokens[:3]


def test_only_accepted_tokens_are_computed_and_what_was_wrong_is_overwritten() -> None:
    tokens = tokens_of(plain(GREEDY))
    driver, drafter = drafting(right_until({0: tokens}, 2, VOCAB))
    request = driver.assign(0, PROMPT, room=20)
    driver.step(assign=[request], run=[RunSlot(0, request.slot_epoch, 6)])
    [event] = driver.step(run=[RunSlot(0, request.slot_epoch, 1, [], 4)])
    assert (event.token_ids, event.num_draft_tokens) == (tokens[:3], 4)
    assert event.num_computed == len(PROMPT) + 2, "the newest one's KV is for the next step"
    assert [(one.start, one.count, one.num_tokens) for one in drafter.told] == [(0, 6, 7), (6, 3, 10)]
    [event] = driver.step(run=[RunSlot(0, request.slot_epoch, 1)])
    assert (event.position, event.token_ids, event.num_draft_tokens) == (3, [tokens[3]], 0)


def test_a_slot_that_is_preempted_in_mid_draft_has_the_accepted_tokens_and_no_others() -> None:
    tokens = tokens_of(plain(GREEDY))
    driver, _ = drafting(right_until({0: tokens, 1: tokens}, 1, VOCAB))
    request = driver.assign(0, PROMPT, room=20)
    driver.step(assign=[request], run=[RunSlot(0, request.slot_epoch, 6)])
    driver.step(run=[RunSlot(0, request.slot_epoch, 1, [], 4)])
    assert driver.step(preempt=[PreemptSlot(0, request.slot_epoch)]) == [
        SlotPreempted(0, request.slot_epoch, len(PROMPT) + 2)
    ]
    again = driver.assign(1, PROMPT + tokens[:2], room=20, num_prompt=len(PROMPT))
    [event] = driver.step(assign=[again], run=[RunSlot(1, again.slot_epoch, 9)])
    assert event.token_ids == [tokens[2]]


def test_drafts_that_are_no_tokens_or_more_than_asked_for_are_left_out() -> None:
    expected = tokens_of(plain(GREEDY))
    for guess in (lambda w, t: [expected[0], 10**6, 3], lambda w, t: [-1], lambda w, t: [3] * 50):
        driver, _ = drafting(guess)
        assert tokens_of(output(driver, PROMPT, GREEDY, 6)) == expected[:6]


def test_drafts_never_take_more_rows_than_a_step_has() -> None:
    driver, _ = drafting(
        lambda draft_request, tokens: [1] * draft_request.num_drafts, max_num_batched_tokens=8, max_num_seqs=8
    )
    requests = [driver.assign(slot, PROMPT, room=20) for slot in range(6)]
    events = generate(driver, requests, 4, 16)
    assert [tokens_of(one)[:4] for one in events] == [tokens_of(plain(GREEDY))[:4]] * 6


def test_drafts_stay_within_the_slot_s_blocks_and_the_longest_list() -> None:
    driver, _ = drafting(lambda draft_request, tokens: [1] * draft_request.num_drafts, max_model_len=32)
    request = driver.assign(0, PROMPT + [1] * 8, room=0)  # 15 of the 16 tokens that its block holds
    driver.step(assign=[request], run=[RunSlot(0, request.slot_epoch, 14)])
    [event] = driver.step(run=[RunSlot(0, request.slot_epoch, 1, [], 4)])
    assert isinstance(event, SlotTokens) and event.num_draft_tokens == 1


def test_a_permission_without_a_drafter_gives_one_token() -> None:
    driver = small_int8.driver()
    request = driver.assign(0, PROMPT, room=9)
    driver.step(assign=[request])
    [event] = driver.step(run=[RunSlot(0, request.slot_epoch, 7, [], 4)])
    assert (len(event.token_ids), event.num_draft_tokens) == (1, 0)


def test_a_peer_s_drafts_are_verified_first_and_once() -> None:
    tokens = tokens_of(plain(GREEDY))
    driver, _ = drafting(lambda draft_request, tokens: [])
    request = driver.assign(0, PROMPT, room=20)
    request = msgspec.structs.replace(request, draft_token_ids=[*tokens[:2], (tokens[2] + 1) % VOCAB])
    driver.step(assign=[request], run=[RunSlot(0, request.slot_epoch, 6)])
    [first] = driver.step(run=[RunSlot(0, request.slot_epoch, 1, [], 4)])
    [second] = driver.step(run=[RunSlot(0, request.slot_epoch, 1, [], 4)])
    assert (first.token_ids, first.num_draft_tokens) == (tokens[:3], 3)
    assert (second.token_ids, second.num_draft_tokens) == ([tokens[3]], 0)


def test_a_peer_s_drafts_are_left_out_once_another_step_has_come_before() -> None:
    """Behind the next token it would be wrong, and count against those who guess well."""
    tokens = tokens_of(plain(GREEDY))
    driver, drafter = drafting(knowing({0: tokens}))
    request = msgspec.structs.replace(driver.assign(0, PROMPT, room=20), draft_token_ids=tokens[:3])
    driver.step(assign=[request], run=[RunSlot(0, request.slot_epoch, 6)])
    driver.step(run=[RunSlot(0, request.slot_epoch, 1)])
    [event] = driver.step(run=[RunSlot(0, request.slot_epoch, 1, [], 4)])
    assert event.token_ids == tokens[1:6]
    assert drafter.num_drafted == 4


def test_the_drafter_is_told_of_every_row_and_what_the_head_reads_of_it() -> None:
    tokens = tokens_of(plain(GREEDY))
    driver, drafter = drafting(knowing({0: tokens}))
    output(driver, PROMPT, GREEDY, 10)
    covered = [position for one in drafter.told for position in range(one.start, one.start + one.count)]
    assert covered == list(range(len(PROMPT) + 9)), "each token once, in order"
    assert all(np.isfinite(rows).all() and rows.shape[1] == 64 for rows in drafter.outputs)


def test_logits_that_are_no_numbers_behind_a_draft_fail_the_request_at_their_own_step() -> None:
    broken = small_int8.arrays()["norm"].copy()
    broken[:] = np.nan
    drafter = Injected(lambda draft_request, tokens: [1] * draft_request.num_drafts)
    driver = small_int8.driver(changes={"norm": broken}, drafter=drafter)
    request = driver.assign(0, PROMPT, room=9)
    driver.step(assign=[request], run=[RunSlot(0, request.slot_epoch, 6)])
    [event] = driver.step(run=[RunSlot(0, request.slot_epoch, 1, [], 3)])
    assert isinstance(event, SlotFailed) and event.code == "invalid_logits"
