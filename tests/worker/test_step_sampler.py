"""Logprobs and logit rules through a real runner: right, and the same however the history was cut."""

import msgspec
import numpy as np
import pytest

from onward.proto.sampling_params import SamplingParams
from onward.proto.step import RunSlot, SlotAdvanced, SlotTokens, TokenLogprobs
from onward.worker.token_logprobs import token_logprobs
from onward.worker.token_span import unowned_span
from tests.worker import small_int8
from tests.worker.driver import Driver

PROMPT = [5, 9, 11, 2, 60, 33, 8]


def run(
    driver: Driver, sampling: SamplingParams, tokens: list[int], chunks: list[int], *, slot: int = 2,
    score_from: int | None = None,
) -> list:  # fmt: skip
    """The events of one request, whose prompt is PROMPT, computed in these chunks."""
    request = driver.assign(slot, tokens, room=20, sampling=sampling, num_prompt=len(PROMPT))
    request = msgspec.structs.replace(request, rescore_from=score_from)
    events = driver.step(assign=[request])
    for chunk in chunks:
        events += driver.step(run=[RunSlot(slot, request.slot_epoch, chunk)])
    return events


def all_logits(tokens: list[int]) -> np.ndarray:
    driver = small_int8.driver()
    driver.step(assign=[driver.assign(0, tokens)])
    return driver.runner.compute_logits([unowned_span(0, 0, len(tokens), is_sampled=False)])


def test_logprobs_are_those_of_the_model_s_own_logits() -> None:
    sampling = SamplingParams(seed=3, temperature=1.5, logprobs=4, logit_bias=((7, 50.0),))
    [event] = run(small_int8.driver(), sampling, PROMPT, [7])
    assert isinstance(event, SlotTokens)
    assert event.token_ids == [7], "the bias decides"
    assert event.logprobs == [token_logprobs(all_logits(PROMPT)[-1], 7, 4)]
    assert event.logprobs[0].rank > 1, "and the logprobs do not know of it"


@pytest.mark.parametrize("chunks", [[7], [1, 6], [3, 3, 1]])
def test_prompt_logprobs_cover_every_token_but_the_first_whatever_the_chunks(chunks: list[int]) -> None:
    events = run(small_int8.driver(), SamplingParams(seed=0, temperature=0.0, prompt_logprobs=2), PROMPT, chunks)
    assert [type(event) for event in events] == [SlotAdvanced] * (len(chunks) - 1) + [SlotTokens]
    found = [one for event in events for one in event.prompt_logprobs]
    rows = all_logits(PROMPT)
    assert found == [token_logprobs(rows[i], token, 2) for i, token in enumerate(PROMPT[1:])]
    assert all(isinstance(one, TokenLogprobs) for one in found)


def test_reports_of_one_slot_do_not_disturb_the_draws_of_others() -> None:
    driver = small_int8.driver()
    plain = [driver.assign(slot, [slot + 1, 4, 9], room=4) for slot in (0, 3)]
    reporting = driver.assign(1, PROMPT, room=4, sampling=SamplingParams(seed=0, temperature=0.0, prompt_logprobs=0))
    runs = [RunSlot(a.slot, a.slot_epoch, len(a.token_ids)) for a in [*plain, reporting]]
    together = driver.step(assign=[*plain, reporting], run=runs)
    for event, request in zip(together, [*plain, reporting], strict=True):
        alone = small_int8.driver()
        again = alone.assign(request.slot, request.token_ids, room=4)
        [expected] = alone.step(assign=[again], run=[RunSlot(again.slot, again.slot_epoch, len(again.token_ids))])
        assert event.token_ids == expected.token_ids


SAMPLING = SamplingParams(
    seed=11,
    temperature=0.9,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    logit_bias=((3, 2.0),),
    bad_words=((4,), (3, 3)),
    logprobs=2,
)


ALLOWED = SamplingParams(seed=11, temperature=1.2, allowed_token_ids=(3, 5, 8, 13, 21), logprobs=2)


@pytest.mark.parametrize("sampling", [SAMPLING, ALLOWED])
def test_a_resumed_request_draws_the_same_tokens_and_logprobs_wherever_it_was_cut(sampling: SamplingParams) -> None:
    whole = run(small_int8.driver(), sampling, PROMPT, [7] + [1] * 9)
    tokens = [event.token_ids[0] for event in whole]
    assert 4 not in tokens
    assert sampling is SAMPLING or {*tokens} <= {*sampling.allowed_token_ids}
    for cut in range(1, 10):
        rest = run(small_int8.driver(), sampling, PROMPT + tokens[:cut], [7 + cut] + [1] * (9 - cut))
        assert [event.token_ids[0] for event in rest] == tokens[cut:]
        assert [event.logprobs for event in rest] == [event.logprobs for event in whole[cut:]]
        assert rest[0].position == cut


@pytest.mark.parametrize("chunks", [[17], [8, 9], [1] * 17, [7, 3, 7]])
@pytest.mark.parametrize("score_from", [8, 9, 13, 16])
def test_given_tokens_are_scored_again_as_they_were_when_they_were_sampled(chunks: list[int], score_from: int) -> None:
    drawn = run(small_int8.driver(), SAMPLING, PROMPT, [7] + [1] * 10)
    tokens = [event.token_ids[0] for event in drawn]
    given = PROMPT + tokens[:10]
    events = run(small_int8.driver(), SAMPLING, given, chunks, score_from=score_from)
    scored = [one for event in events for one in event.prompt_logprobs or []]
    assert scored == [event.logprobs[0] for event in drawn[score_from - len(PROMPT) : 10]]
    assert (events[-1].token_ids, events[-1].logprobs) == (drawn[10].token_ids, drawn[10].logprobs)


def test_scoring_asks_for_no_more_rows_than_it_reports() -> None:
    """A step's rows of logits are few: those before the first scored token take none."""
    driver = small_int8.driver(max_num_seqs=1, max_model_len=256, max_num_batched_tokens=200)
    given = [(3 * i) % 97 for i in range(190)]
    events = run(driver, SamplingParams(seed=0, temperature=0.0, logprobs=0), given, [190], slot=0, score_from=189)
    assert len(events[0].prompt_logprobs) == 1


def test_after_the_given_tokens_nothing_is_scored() -> None:
    drawn = run(small_int8.driver(), SAMPLING, PROMPT, [7] + [1] * 5)
    given = PROMPT + [event.token_ids[0] for event in drawn[:3]]
    events = run(small_int8.driver(), SAMPLING, given, [10, 1, 1], score_from=8)
    assert [event.prompt_logprobs is None for event in events] == [False, True, True]
