"""A request that the engine gives up: what was generated, and all that is needed to have it continued elsewhere."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from onward.proto.engine import ErrorInfo
from onward.proto.sampling_params import SamplingParams
from tests.api.instance import Instance
from tests.api.reader import PATHS, PROMPT, AnswerRead, ask, read, request
from tests.api.small_model import EOS

GIVEN_UP = ErrorInfo("pd_preempted", "PD Error: out of blocks", 503, True, retry_after_s=1.5, stage="decode")
TOLD = {
    "message": "PD Error: out of blocks",
    "type": "server_error",
    "param": None,
    "code": "pd_preempted",
    "retryable": True,
    "stage": "decode",
    "retry_after_s": 1.5,
}
# Characters of two to four bytes, beginnings of the stop string, and every kind of end.
OUTPUTS = [
    list("né st😀 s stop!".encode()),
    [*"日本".encode(), EOS],
    list("éstops here".encode()),
    list(b"so now it ends in st"),
]
LENGTH = 20
FIELDS: dict[str, Any] = {
    "stop": "stop",
    "max_tokens": LENGTH,
    "min_tokens": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 1.0},
}
STREAMING = pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
EVERY_PATH = pytest.mark.parametrize("path", PATHS)


def recite(prompt: Any, sampling: SamplingParams, tokens: Any) -> int:
    output = OUTPUTS[sampling.choice_index]
    return output[len(tokens)] if len(tokens) < len(output) else 33


def give_up_at(*positions: int | None) -> Callable[[SamplingParams, int], ErrorInfo | None]:
    """Each choice at its own position, or never."""
    return lambda sampling, position: GIVEN_UP if position == positions[sampling.choice_index] else None


def with_logprobs(path: str) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": 2} if "chat" in path else {"logprobs": 2}


def cut_and_continue(instance: Instance, path: str, body: dict[str, Any], cuts: list[int | None]) -> list[AnswerRead]:
    instance.engine.give_up = give_up_at(*cuts)
    first = ask(instance.url, path, body)
    instance.engine.give_up = give_up_at(*[None] * len(cuts))
    assert first.resume is not None
    return [first, ask(instance.url, path, body | first.resume)]


def assert_joined(whole: AnswerRead, first: AnswerRead, second: AnswerRead) -> None:
    assert [a + b for a, b in zip(first.texts, second.texts, strict=True)] == whole.texts
    assert [a + b for a, b in zip(first.logprobs, second.logprobs, strict=True)] == whole.logprobs
    assert (second.reasons, second.usage) == (whole.reasons, whole.usage)
    assert second.resume is None and second.completion_token_ids == [None] * len(whole.choices)


@EVERY_PATH
@STREAMING
def test_one_choice_cut_anywhere_is_continued_to_the_same_answer(
    instance: Instance, path: str, streaming: bool
) -> None:
    instance.engine.choose = recite
    body = request(path, streaming, **FIELDS, **with_logprobs(path))
    whole = ask(instance.url, path, body | {"seed": 7})
    assert whole.reasons == ["stop"] and whole.resume is None and whole.seed is None
    for cut in range(1, len(OUTPUTS[0]) - 1):
        first, second = cut_and_continue(instance, path, body, [cut])
        assert_joined(whole, first, second)
        assert first.completion_token_ids == [OUTPUTS[0][:cut]]
        assert first.usage is not None and first.usage["completion_tokens"] == cut
        assert (first.reasons, first.choices[0].error) == (["pd_reschedule"], TOLD)
        before, after = instance.engine.submits[-2:]
        assert before.sampling_params == after.sampling_params and after.sampling_params.seed == first.seed
        assert after.generated_token_ids == OUTPUTS[0][:cut]


@EVERY_PATH
@STREAMING
def test_four_choices_cut_anywhere_are_continued_to_the_same_answer(
    instance: Instance, path: str, streaming: bool
) -> None:
    instance.engine.choose = recite
    chance = random.Random(f"{path} {streaming}")
    body = request(path, streaming, n=4, **FIELDS, **with_logprobs(path))
    whole = ask(instance.url, path, body | {"seed": 7})
    assert whole.reasons == ["stop", "stop", "stop", "length"]
    for _ in range(12):
        cuts: list[int | None] = [chance.choice([None, *range(LENGTH)]) for _ in range(4)]
        cuts[chance.randrange(4)] = 1
        before = len(instance.engine.submits)
        first, second = cut_and_continue(instance, path, body, cuts)
        assert_joined(whole, first, second)
        given_up = [reason == "pd_reschedule" for reason in first.reasons]
        assert len(instance.engine.submits) == before + 4 + sum(given_up), "what had ended is not run again"
        assert [one.num_ends for one in first.choices + second.choices] == [1] * 8
        assert first.resume is not None and first.usage is not None
        assert first.usage["completion_tokens"] == sum(map(len, first.resume["generated_token_ids"]))
        assert first.seed == instance.engine.submits[-1].sampling_params.seed


@EVERY_PATH
def test_a_whole_answer_has_the_tokens_of_every_choice_if_one_was_given_up(instance: Instance, path: str) -> None:
    instance.engine.choose = recite
    instance.engine.give_up = give_up_at(3, None, None, 0)
    answer = ask(instance.url, path, request(path, False, n=4, seed=7, **FIELDS))
    assert answer.reasons == ["pd_reschedule", "stop", "stop", "pd_reschedule"]
    expected = [OUTPUTS[0][:3], OUTPUTS[1], OUTPUTS[2][:6], []]
    assert answer.completion_token_ids == expected
    assert answer.resume == {
        "seed": 7,
        "generated_token_ids": expected,
        "generated_finish_reasons": [None, "stop", "stop", None],
    }
    assert [one.error is not None for one in answer.choices] == [True, False, False, True]
    assert answer.usage is not None and answer.usage["completion_tokens"] == sum(map(len, expected))


@EVERY_PATH
def test_a_streams_last_chunk_has_the_tokens_of_choices_that_ended_long_before(instance: Instance, path: str) -> None:
    instance.engine.choose = recite
    instance.engine.give_up = give_up_at(12, None, None, None)
    answer = ask(instance.url, path, request(path, True, n=4, seed=7, **FIELDS))
    assert answer.resume is not None
    tokens = [one.token_ids for one in answer.choices]
    assert answer.resume["generated_token_ids"] == tokens, "what the cursors say, too"
    assert answer.resume["generated_finish_reasons"] == [None, "stop", "stop", "length"]
    assert answer.completion_token_ids[0] == tokens[0] and answer.completion_token_ids[3] == tokens[3]
    assert answer.cursor is not None
    assert [one.finish_reason for one in answer.cursor.choices] == ["pd_reschedule", "stop", "stop", "length"]


@EVERY_PATH
@STREAMING
def test_neither_half_a_character_nor_a_beginning_of_a_stop_string_is_shown(
    instance: Instance, path: str, streaming: bool
) -> None:
    instance.engine.choose = recite
    shown = ["", "n", "n", "né", *["né "] * 6, "né st😀", "né st😀 "]
    for cut in range(1, len(shown)):
        instance.engine.give_up = give_up_at(cut)
        answer = ask(instance.url, path, request(path, streaming, **FIELDS))
        assert answer.texts == ([""] if "generate" in path else [shown[cut]])
        assert answer.completion_token_ids == [OUTPUTS[0][:cut]]


@EVERY_PATH
def test_without_any_token_it_is_an_error_of_http(instance: Instance, path: str) -> None:
    instance.engine.give_up = give_up_at(0, 0)
    response = httpx.post(instance.url + path, json=request(path, False, n=2), timeout=30)
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    assert response.json() == {"error": TOLD}


@EVERY_PATH
@STREAMING
def test_an_engine_that_gives_up_before_it_accepts_is_an_error_of_http(
    instance: Instance, path: str, streaming: bool
) -> None:
    instance.engine.refusal = GIVEN_UP
    response = httpx.post(instance.url + path, json=request(path, streaming, n=2), timeout=30)
    assert (response.status_code, response.json()) == (503, {"error": TOLD})


@EVERY_PATH
def test_a_stream_that_has_begun_and_has_no_token_ends_with_an_error_event(instance: Instance, path: str) -> None:
    instance.engine.paused = True
    instance.engine.give_up = give_up_at(0)
    body = request(path, True)
    with httpx.stream("POST", instance.url + path, json=body, timeout=30) as response:
        instance.engine.paused = False
        response.read()
    answer = read(response, body)
    assert (response.status_code, answer.error, answer.reasons) == (200, TOLD, [None])


@STREAMING
def test_an_engine_that_gives_up_what_it_was_given_returns_just_that(instance: Instance, streaming: bool) -> None:
    instance.engine.choose = recite
    body = request("/v1/completions", streaming, seed=7, generated_token_ids=OUTPUTS[0][:4], **FIELDS)
    for refused in (True, False):
        instance.engine.refusal = GIVEN_UP if refused else None
        instance.engine.give_up = give_up_at(4)
        answer = ask(instance.url, "/v1/completions", body)
        assert (answer.texts, answer.reasons) == ([""], ["pd_reschedule"])
        assert answer.completion_token_ids == [OUTPUTS[0][:4]]
        assert answer.usage is not None and answer.usage["completion_tokens"] == 4


def test_a_fault_of_another_choice_is_still_a_fault_of_the_request(instance: Instance) -> None:
    crashed = ErrorInfo("crashed_worker", "it crashed the worker three times", 500)
    instance.engine.choose = recite
    instance.engine.paused = True
    with ThreadPoolExecutor(1) as threads:
        body = request("/v1/completions", False, n=2)
        asking = threads.submit(httpx.post, f"{instance.url}/v1/completions", json=body, timeout=30)
        instance.wait_until(lambda: len(instance.engine.running) == 2)
        instance.lose_requests(1, crashed)
        instance.engine.give_up = give_up_at(1, 1)
        instance.engine.paused = False
        response = asking.result(20)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "crashed_worker")


@STREAMING
def test_an_abort_that_crosses_a_reschedule_is_an_abort(instance: Instance, streaming: bool) -> None:
    """One choice has been given up, the other is still running: the user's word counts for the whole."""

    def pause_in_the_middle(prompt: Any, sampling: SamplingParams, tokens: Any) -> int:
        instance.engine.paused = len(tokens) == 9
        return 97

    instance.engine.choose = pause_in_the_middle
    instance.engine.give_up = give_up_at(2, None)
    body = request("/v1/completions", streaming, n=2, max_tokens=200)
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(httpx.post, f"{instance.url}/v1/completions", json=body, timeout=30)
        instance.wait_until(lambda: instance.engine.paused)
        [request_id] = instance.engine.running
        name = request_id.rpartition("-")[0]
        assert httpx.post(f"{instance.url}/v1/abort", json={"ids": [name]}).json()["aborted"] == [name]
        response = asking.result(20)
    assert response.status_code == 200
    answer = read(response, body)
    # A stream has told the first end before the abort came.
    assert answer.reasons == ["pd_reschedule" if streaming else "abort", "abort"] and answer.error is None
    assert not instance.engine.running


def test_the_openai_client_reads_it(instance: Instance, client: openai.OpenAI) -> None:
    instance.engine.choose = recite
    instance.engine.give_up = give_up_at(4)
    arguments: Any = {"model": "small-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16}
    answer = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(**arguments, stream=True))
    assert answer.choices[0].message.content == "né "
    for choice in (answer.choices[0], chunks[-1].choices[0]):
        assert choice.finish_reason == "pd_reschedule"
        assert choice.model_extra is not None and choice.model_extra["completion_token_ids"] == OUTPUTS[0][:4]
    assert chunks[-1].model_extra is not None and chunks[-1].model_extra["seed"] < 2**53


@STREAMING
def test_a_choice_that_has_told_its_end_is_not_run_and_says_nothing_new(instance: Instance, streaming: bool) -> None:
    """Its tokens alone would release the held-back `st` once more."""
    instance.engine.choose = recite
    before = len(instance.engine.submits)
    given: list[list[int]] = [[97], [97, 98], OUTPUTS[2][:2], OUTPUTS[3]]
    body = request("/v1/completions", streaming, n=4, generated_token_ids=given, **FIELDS)
    body["generated_finish_reasons"] = ["stop", "length", "pd_reschedule", "length"]
    answer = ask(instance.url, "/v1/completions", body)
    assert answer.texts == ["", "", "", ""]
    assert answer.reasons == ["stop", "length", "stop", "length"]
    assert [one.request_id[-2:] for one in instance.engine.submits[before:]] == ["-2"]
    assert answer.usage is not None and answer.usage["completion_tokens"] == 1 + 2 + 6 + LENGTH


def test_what_was_given_to_the_engine_is_the_prompt_as_it_was(instance: Instance) -> None:
    instance.engine.choose = recite
    cut_and_continue(instance, "/v1/completions", request("/v1/completions", False, **FIELDS), [3])
    assert instance.engine.submits[-1].prompt_token_ids == PROMPT
