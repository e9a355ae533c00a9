"""A request that is aborted or fails returns what was generated: text, the tokens that it covers, and how to continue."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import openai
import pytest

from onward.api.engine_link.request_tracker import ABORTED
from onward.proto.engine import ErrorInfo
from onward.proto.router import CLOSE_PATH, ChoiceSnapshot, CloseAttempt, ClosedAttempt
from onward.proto.sampling_params import SamplingParams
from tests.api.instance import Instance
from tests.api.reader import NO_CERTIFICATES, PATHS, AnswerRead, ChoiceRead, ask, num_choices, read, request, take
from tests.api.routed import attempt_of

CRASHED = ErrorInfo("crashed_worker", "it crashed the worker three times", 500)
TOO_LATE = ErrorInfo("deadline_exceeded", "the request's deadline has passed", 504)
# Characters of one to four bytes, each byte a token, and the beginning of the stop string.
OUTPUT = list("né st😀 s stop!".encode())
SHOWN = ["", "n", "n", "né", *["né "] * 6, "né st😀", "né st😀 ", "né st😀 "]
COVERED = [0, 1, 1, 3, *[4] * 6, 10, 11, 11]
"""`SHOWN` is the text after each number of tokens, and `COVERED` how many of them it shows whole."""
FIELDS: dict[str, Any] = {"stop": "stop", "max_tokens": 20, "seed": 7}
STREAMING = pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
EVERY_PATH = pytest.mark.parametrize("path", PATHS)


def undisturbed(prompt: Any, sampling: SamplingParams, tokens: Any) -> int:
    """The engine may go on for a while after the stop string, until it is told."""
    return OUTPUT[len(tokens)] if len(tokens) < len(OUTPUT) else 33


MAX_RACES = 10


@contextmanager
def paused_at(
    instance: Instance, path: str, body: dict[str, Any], num_tokens: int
) -> Iterator["Future[httpx.Response]"]:
    """A request of which every choice has so many tokens, and gets no more."""
    engine = instance.engine

    def recite(prompt: Any, sampling: SamplingParams, tokens: Any) -> int:
        engine.paused = engine.paused or len(tokens) + 1 == num_tokens
        return undisturbed(prompt, sampling, tokens)

    def all_have(count: int) -> bool:
        lengths = [len(one.tokens) for one in engine.running.values()]
        return lengths == [count] * num_choices(body) * body.get("best_of", 1)

    engine.choose, engine.paused = recite, True
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(httpx.post, instance.url + path, json=body, timeout=30, verify=NO_CERTIFICATES)
        instance.wait_until(lambda: all_have(0))  # so that all of them begin in the same step
        engine.paused = num_tokens == 0
        instance.wait_until(lambda: all_have(num_tokens))
        yield asking
        engine.choose, engine.paused = undisturbed, False


def aborted(instance: Instance, path: str, body: dict[str, Any], num_tokens: int) -> AnswerRead:
    """On a busy machine an abort may overtake several tokens on their way to the api process. Such a race is run again."""
    for _ in range(MAX_RACES):
        answer = _aborted_once(instance, path, body, num_tokens)
        if all(len(choice.completion_token_ids or []) >= num_tokens - 1 for choice in answer.choices):
            break
    return answer


def _aborted_once(instance: Instance, path: str, body: dict[str, Any], num_tokens: int) -> AnswerRead:
    with paused_at(instance, path, body, num_tokens) as asking:
        answer = httpx.post(f"{instance.url}/v1/abort", json={"all": True}, verify=NO_CERTIFICATES)
        assert len(answer.json()["aborted"]) >= 1
        response = asking.result(20)
    assert response.status_code == 200, response.text
    return read(response, body)


def check_cut(choice: ChoiceRead, most: int, *, is_text: bool = True) -> int:
    """Whether a choice of an aborted answer is in order: its text covers what it says of its tokens. The newest token may
    have been on its way when the abort came."""
    assert choice.finish_reason == "abort" and choice.completion_token_ids is not None
    num_tokens = len(choice.completion_token_ids)
    assert most - 1 <= num_tokens <= most
    assert choice.completion_token_ids == OUTPUT[:num_tokens]
    assert choice.text == (SHOWN[num_tokens] if is_text else "")
    assert choice.num_text_tokens == (COVERED[num_tokens] if is_text else None)
    return num_tokens


def failed(instance: Instance, path: str, body: dict[str, Any], num_tokens: int, error: ErrorInfo) -> httpx.Response:
    with paused_at(instance, path, body, num_tokens) as asking:
        instance.lose_requests(1, error)
        return asking.result(20)


def in_error(response: httpx.Response, body: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """The code and `partial`."""
    if body.get("stream"):
        answer = read(response, body)
        assert answer.error is not None
        return answer.error["code"], answer.partial
    return response.json()["error"]["code"], response.json().get("partial")


def part_of(partial: dict[str, Any], body: dict[str, Any]) -> AnswerRead:
    """The part of an answer that is not streamed, which has the form of the answer."""
    answer = AnswerRead([ChoiceRead() for _ in range(num_choices(body))])
    take(answer, partial)
    return answer


@EVERY_PATH
@STREAMING
def test_an_aborted_request_returns_its_text_and_its_tokens_and_can_be_continued(
    instance: Instance, path: str, streaming: bool
) -> None:
    body = request(path, streaming, **FIELDS)
    instance.engine.choose = undisturbed
    whole = ask(instance.url, path, body)
    assert whole.reasons == ["stop"]
    for num_tokens in (1, 2, 3, 5, 8, 12):
        answer = aborted(instance, path, body, num_tokens)
        assert answer.error is None
        num_told = check_cut(answer.choices[0], num_tokens, is_text="generate" not in path)
        assert answer.usage is not None and answer.usage["completion_tokens"] == num_told
        assert answer.resume is not None
        rest = ask(instance.url, path, body | answer.resume)
        assert [a + b for a, b in zip(answer.texts, rest.texts, strict=True)] == whole.texts
        assert (rest.reasons, rest.usage) == (whole.reasons, whole.usage)


@STREAMING
def test_what_continues_a_request_has_the_length_that_its_prompt_was_cut_to(
    instance: Instance, streaming: bool
) -> None:
    """An instance with another context would cut it to another length."""
    prompt = [97 + index % 26 for index in range(400)]
    cut = {"prompt": prompt, "truncate_prompt_tokens": -1}
    body = request("/v1/completions", streaming, **FIELDS) | cut
    answer = aborted(instance, "/v1/completions", body, 3)
    assert answer.resume is not None and answer.resume["truncate_prompt_tokens"] == 236
    ask(instance.url, "/v1/completions", body | answer.resume | {"max_tokens": 5})
    assert instance.engine.submits[-1].prompt_token_ids == prompt[-236:]
    response = failed(instance, "/v1/completions", body, 3, CRASHED)
    _, partial = in_error(response, body)
    assert partial is not None and partial["resume"]["truncate_prompt_tokens"] == 236


@EVERY_PATH
@STREAMING
def test_a_request_that_is_aborted_before_its_first_token_returns_empty_text(
    instance: Instance, path: str, streaming: bool
) -> None:
    answer = aborted(instance, path, request(path, streaming, n=2), 0)
    assert (answer.texts, answer.reasons, answer.completion_token_ids) == (["", ""], ["abort", "abort"], [[], []])
    assert answer.usage is not None and answer.usage["completion_tokens"] == 0


@STREAMING
def test_every_prompt_and_choice_of_an_aborted_request_returns_what_it_has(instance: Instance, streaming: bool) -> None:
    prompts: list[list[int]] = [[97], [98, 99]]
    body = request("/v1/completions", streaming, **FIELDS) | {"n": 2, "prompt": prompts}
    answer = aborted(instance, "/v1/completions", body, 4)
    for choice in answer.choices:
        check_cut(choice, 4)


@STREAMING
def test_a_choice_that_had_ended_keeps_its_end_when_the_request_is_aborted(instance: Instance, streaming: bool) -> None:
    engine = instance.engine

    def one_ends(prompt: Any, sampling: SamplingParams, tokens: Any) -> int:
        engine.paused = engine.paused or len(tokens) == 3
        return (
            (b"stop" + b"!" * 20)[len(tokens)] if sampling.choice_index == 0 else undisturbed(prompt, sampling, tokens)
        )

    body = request("/v1/completions", streaming, n=2, **FIELDS)
    engine.choose, engine.paused = one_ends, True
    with ThreadPoolExecutor(1) as threads:
        url = f"{instance.url}/v1/completions"
        asking = threads.submit(httpx.post, url, json=body, timeout=30, verify=NO_CERTIFICATES)
        instance.wait_until(lambda: len(engine.running) == 2)
        engine.paused = False
        # The api has read the last token of the first choice, and says so by the stop string in it.
        instance.wait_until(lambda: engine.paused and len(engine.running) == 1)
        httpx.post(f"{instance.url}/v1/abort", json={"all": True}, verify=NO_CERTIFICATES)
        answer = read(asking.result(20), body)
    assert (answer.texts[0], answer.reasons) == ("", ["stop", "abort"])
    num_told = check_cut(answer.choices[1], 4)
    assert answer.resume is not None
    assert answer.resume["generated_token_ids"] == [list(b"stop"), OUTPUT[:num_told]]
    assert answer.resume["generated_finish_reasons"] == ["stop", None]


def test_an_aborted_stream_does_not_come_back(instance: Instance) -> None:
    body = request("/v1/completions", True, **FIELDS)
    with paused_at(instance, "/v1/completions", body, 3) as asking:
        httpx.post(f"{instance.url}/v1/abort", json={"all": True}, verify=NO_CERTIFICATES)
        text = asking.result(20).text
    places = [line.removeprefix("id: ") for line in text.split("\n") if line.startswith("id: ")]
    for method in ("GET", "POST"):
        again = httpx.request(
            method,
            f"{instance.url}/v1/completions",
            json=body,
            headers={"Last-Event-ID": places[-2]},
            timeout=30,
            verify=NO_CERTIFICATES,
        )
        assert (again.status_code, again.json()["error"]["code"]) == (404, "stream_unknown")


@EVERY_PATH
@STREAMING
@pytest.mark.parametrize("error", [CRASHED, TOO_LATE], ids=["crashed", "deadline"])
def test_a_failed_request_returns_what_it_has_next_to_the_error(
    instance: Instance, path: str, streaming: bool, error: ErrorInfo
) -> None:
    body = request(path, streaming, n=2, **FIELDS)
    response = failed(instance, path, body, 8, error)
    assert response.status_code == (200 if streaming else error.status)
    code, partial = in_error(response, body)
    assert code == error.code and partial is not None
    assert [one["completion_token_ids"] for one in partial["choices"]] == [OUTPUT[:8]] * 2
    assert [one["finish_reason"] for one in partial["choices"]] == [None, None]
    assert partial["resume"] == {
        "seed": 7,
        "generated_token_ids": [OUTPUT[:8]] * 2,
        "generated_finish_reasons": [None, None],
    }
    if "generate" not in path:
        assert [one["num_text_tokens"] for one in partial["choices"]] == [COVERED[8]] * 2
    said = read(response, body) if streaming else part_of(partial, body)
    assert said.texts == (["", ""] if "generate" in path else [SHOWN[8]] * 2)
    if not streaming and "generate" in path:
        assert [one.token_ids for one in said.choices] == [OUTPUT[:8]] * 2


@EVERY_PATH
@STREAMING
def test_a_request_that_fails_before_its_first_token_has_no_part(
    instance: Instance, path: str, streaming: bool
) -> None:
    body = request(path, streaming, **FIELDS)
    assert in_error(failed(instance, path, body, 0, CRASHED), body) == ("crashed_worker", None)


def test_best_of_returns_the_best_candidates_so_far_and_nothing_to_resume(instance: Instance) -> None:
    body = request("/v1/completions", False, **FIELDS) | {"best_of": 3}
    code, partial = in_error(failed(instance, "/v1/completions", body, 5, CRASHED), body)
    assert code == "crashed_worker" and partial is not None
    [choice] = partial["choices"]
    assert (choice["text"], choice["completion_token_ids"], choice["num_text_tokens"]) == ("né ", OUTPUT[:5], 4)
    assert "resume" not in partial
    instance.engine.refusal = None
    answer = aborted(instance, "/v1/completions", body, 5)
    assert answer.resume is None
    check_cut(answer.choices[0], 5)


@STREAMING
def test_an_echo_without_output_has_no_tokens_to_continue_from(instance: Instance, streaming: bool) -> None:
    """Each choice has a token that the response leaves out, and a request with such tokens is refused."""
    given_up = ErrorInfo("pd_preempted", "PD Error: out of blocks", 503, True)
    instance.engine.choose = undisturbed
    instance.engine.give_up = lambda sampling, position: given_up if sampling.choice_index else None
    body = request("/v1/completions", streaming, echo=True, n=2) | {"max_tokens": 0}
    answer = ask(instance.url, "/v1/completions", body)
    assert answer.reasons == ["length", "pd_reschedule"]
    assert (answer.resume, answer.completion_token_ids) == (None, [None, None])
    instance.engine.give_up = lambda sampling, position: None
    assert ask(instance.url, "/v1/completions", body).reasons == ["length", "length"], "it is simply sent again"


def test_a_given_up_request_with_best_of_returns_its_candidates(instance: Instance) -> None:
    given_up = ErrorInfo("pd_preempted", "PD Error: out of blocks", 503, True)
    instance.engine.choose = undisturbed
    instance.engine.give_up = lambda sampling, position: given_up if position == 3 else None
    body = request("/v1/completions", False, **FIELDS) | {"best_of": 2}
    response = httpx.post(f"{instance.url}/v1/completions", json=body, timeout=30, verify=NO_CERTIFICATES)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "pd_preempted")
    [choice] = response.json()["partial"]["choices"]
    num_tokens = len(choice["completion_token_ids"])
    assert num_tokens > 0 and choice["completion_token_ids"] == OUTPUT[:num_tokens]
    assert (choice["text"], choice["finish_reason"]) == (SHOWN[num_tokens], None)


def test_the_openai_client_reads_an_aborted_answer(instance: Instance, client: openai.OpenAI) -> None:
    engine = instance.engine
    engine.paused = True
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(client.completions.create, model="small-model", prompt=[97], max_tokens=9)
        instance.wait_until(lambda: len(engine.running) == 1)
        httpx.post(f"{instance.url}/v1/abort", json={"all": True}, verify=NO_CERTIFICATES)
        answer = asking.result(20)
    assert [(one.text, str(one.finish_reason)) for one in answer.choices] == [("", "abort")]


# What a router asks for when it gives a request up.


def closed(instance: Instance, path: str, body: dict[str, Any], error: ErrorInfo, **fields: Any) -> ClosedAttempt:
    message = msgspec.msgpack.encode(CloseAttempt(attempt_of(path, body, **fields), error))
    headers = {"Content-Type": "application/msgpack"}
    url = instance.url + CLOSE_PATH
    response = httpx.post(url, content=message, headers=headers, timeout=30, verify=NO_CERTIFICATES)
    assert response.status_code == 200, response.text
    return msgspec.msgpack.decode(response.content, type=ClosedAttempt)


def read_closed(one: ClosedAttempt, body: dict[str, Any]) -> AnswerRead:
    content = one.body + (b"data: [DONE]\n\n" if body.get("stream") else b"")
    return read(httpx.Response(one.status, content=content), body)


@EVERY_PATH
@STREAMING
def test_an_instance_writes_the_end_of_an_aborted_request_from_its_tokens(
    instance: Instance, path: str, streaming: bool
) -> None:
    body = request(path, streaming, n=2, **FIELDS)
    choices = [ChoiceSnapshot(OUTPUT[:8]), ChoiceSnapshot(OUTPUT[:4], "length")]
    num_submits = len(instance.engine.submits)
    one = closed(instance, path, body, ABORTED, choices=choices)
    answer = read_closed(one, body)
    assert one.status == 200 and answer.error is None
    assert answer.reasons == ["abort", None if streaming else "length"]
    assert answer.completion_token_ids[0] == OUTPUT[:8]
    assert answer.resume is not None and answer.resume["generated_finish_reasons"] == [None, "length"]
    if not streaming and "generate" not in path:
        assert (answer.texts, answer.choices[0].num_text_tokens) == ([SHOWN[8], "né "], COVERED[8])
    assert len(instance.engine.submits) == num_submits, "nothing is generated"


@EVERY_PATH
@STREAMING
def test_an_instance_writes_the_error_with_the_part_that_a_router_has(
    instance: Instance, path: str, streaming: bool
) -> None:
    body = request(path, streaming, **FIELDS)
    lost = ErrorInfo("upstream_lost", "the connection to the instance was lost", 503, True, retry_after_s=1.0)
    one = closed(instance, path, body, lost, choices=[ChoiceSnapshot(OUTPUT[:8])])
    assert one.status == (200 if streaming else 503)
    partial = read_closed(one, body).partial if streaming else msgspec.json.decode(one.body)["partial"]
    assert partial is not None
    assert [choice["completion_token_ids"] for choice in partial["choices"]] == [OUTPUT[:8]]
    assert partial["resume"]["generated_token_ids"] == OUTPUT[:8]
    if not streaming:
        assert part_of(partial, body).texts == (["né "] if "generate" not in path else [""])


@EVERY_PATH
@STREAMING
def test_an_instance_writes_an_empty_answer_for_a_request_that_never_began(
    instance: Instance, path: str, streaming: bool
) -> None:
    body = request(path, streaming, n=2)
    answer = read_closed(closed(instance, path, body, ABORTED), body)
    assert (answer.texts, answer.reasons) == (["", ""], ["abort", "abort"])


SCORED = {
    "/v1/chat/completions": {"logprobs": True},
    "/v1/completions": {"logprobs": 0},
    "/v1/generate": {"logprobs": 0},
}


@EVERY_PATH
def test_an_answer_that_lacks_the_logprobs_it_was_asked_for_is_not_written_as_complete(
    instance: Instance, path: str
) -> None:
    ended = [ChoiceSnapshot(OUTPUT[:4], "length")]
    one = closed(instance, path, request(path, False, **FIELDS), ABORTED, choices=ended)
    assert (one.status, msgspec.json.decode(one.body)["choices"][0]["finish_reason"]) == (200, "length")
    for fields in (SCORED[path], {"prompt_logprobs": 0}):
        one = closed(instance, path, request(path, False, **FIELDS, **fields), ABORTED, choices=ended)
        written = msgspec.json.decode(one.body)
        assert (one.status, written["error"]["code"]) == (409, "aborted")
        assert written["partial"]["choices"][0]["completion_token_ids"] == OUTPUT[:4]
        assert written["partial"]["resume"]["generated_finish_reasons"] == ["length"]


def test_a_failed_response_is_failed_and_has_its_output(instance: Instance) -> None:
    engine = instance.engine

    def recite(prompt: Any, sampling: SamplingParams, tokens: Any) -> int:
        engine.paused = len(tokens) + 1 == 8
        return undisturbed(prompt, sampling, tokens)

    engine.choose = recite
    body = {"model": "small-model", "input": "hello", "max_output_tokens": 20, "store": False}
    with ThreadPoolExecutor(1) as threads:
        url = f"{instance.url}/v1/responses"
        asking = threads.submit(httpx.post, url, json=body, timeout=30, verify=NO_CERTIFICATES)
        instance.wait_until(lambda: engine.paused)
        instance.lose_requests(1, CRASHED)
        response = asking.result(20)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "crashed_worker")
    partial = response.json()["partial"]
    assert (partial["status"], partial["error"]["type"]) == ("failed", "crashed_worker")
    assert partial["output"][0]["content"][0]["text"] == "né st"
