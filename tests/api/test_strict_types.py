"""Every answer and every chunk is what the openai package's types say, strictly."""

from typing import Any

import httpx
import msgspec
import pytest
from pydantic import ValidationError

from onward.proto.cursor import ChoiceCursor, format_cursor, parse_cursor
from onward.proto.engine import ErrorInfo
from tests.api.instance import Instance
from tests.api.reader import NO_CERTIFICATES
from tests.api.strict_types import RESCHEDULE, check_answer, check_error, check_events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
IDS = frozenset({"token_ids", "prompt_token_ids"})
SCORES = frozenset({"prompt_logprobs"})
STOPS = frozenset({"stop_reason", "matched_stop"})
USAGE = {"include_usage": True, "continuous_usage_stats": True}

ASKED: list[tuple[str, dict[str, Any], frozenset[str]]] = [
    (CHAT, MESSAGES | {"n": 2, "logprobs": True, "top_logprobs": 2}, frozenset()),
    (CHAT, MESSAGES | {"stop": "e", "max_tokens": 40, "prompt_logprobs": 1}, SCORES | STOPS),
    (CHAT, MESSAGES | {"return_token_ids": True}, IDS),
    (COMPLETIONS, {"prompt": "x", "logprobs": 2, "n": 2}, frozenset()),
    (COMPLETIONS, {"prompt": ["x", "y"], "echo": True, "logprobs": 0}, frozenset()),
    (COMPLETIONS, {"prompt": [[97], [98]], "return_token_ids": True, "prompt_logprobs": 0}, IDS | SCORES),
    (CHAT, {"prompt_token_ids": [97, 98]}, frozenset()),
    (CHAT, MESSAGES | {"generated_token_ids": [97, 98], "rescore_from": 0, "logprobs": True}, frozenset()),
    (CHAT, MESSAGES | {"n": 2, "prompt_logprobs": 2, "return_token_ids": True}, IDS | SCORES),
    (COMPLETIONS, {"prompt": "x", "echo": True, "n": 2}, frozenset()),
    (COMPLETIONS, {"prompt": "xy", "echo": True, "logprobs": 2, "n": 2}, frozenset()),
    (COMPLETIONS, {"prompt": "x", "stop": "e", "max_tokens": 40, "include_stop_str_in_output": True}, STOPS),
    (COMPLETIONS, {"prompt": "x", "generated_token_ids": [97, 98], "logprobs": 1}, frozenset()),
]


@pytest.mark.parametrize(("path", "fields", "ours"), ASKED, ids=range(len(ASKED)))
def test_answers_and_chunks_are_as_the_openai_package_says(
    instance: Instance, path: str, fields: dict[str, Any], ours: frozenset[str]
) -> None:
    body = {"model": "small-model", "max_tokens": 5, "seed": 7} | fields
    with httpx.Client(base_url=instance.url, timeout=30, verify=NO_CERTIFICATES) as http:
        check_answer(http.post(path, json=body).json(), ours)
        streamed = http.post(path, json=body | {"stream": True, "stream_options": USAGE}).text
    chunks = check_events(streamed, ours)
    assert chunks[-1]["choices"] == [] and all(chunk["usage"] is not None for chunk in chunks)


def said_in(chunks: list[dict[str, Any]]) -> str:
    return "".join(one["delta"].get("content", "") for chunk in chunks for one in chunk["choices"])


def test_the_best_of_several_is_as_the_openai_package_says(instance: Instance) -> None:
    body = {"model": "small-model", "prompt": "x", "max_tokens": 5, "n": 2, "best_of": 4, "logprobs": 1}
    answer = httpx.post(instance.url + COMPLETIONS, json=body, timeout=30, verify=NO_CERTIFICATES).json()
    check_answer(answer)
    assert (len(answer["choices"]), answer["usage"]["completion_tokens"]) == (2, 20)


def test_vectors_and_models_are_as_the_openai_package_says(instance: Instance) -> None:
    with httpx.Client(base_url=instance.url, timeout=30, verify=NO_CERTIFICATES) as http:
        vectors = http.post("/v1/embeddings", json={"model": "small-model", "input": ["x", "yz"]}).json()
        models = http.get("/v1/models").json()
    check_answer(vectors)
    assert len(vectors["data"]) == 2
    assert models["object"] == "list" and [one["id"] for one in models["data"]] == ["small-model"]
    check_answer(models["data"][0], frozenset({"max_model_len", "meta", "root"}))


def test_a_stream_that_is_gone_on_with_is_as_the_openai_package_says(instance: Instance) -> None:
    body = {"model": "small-model", "max_tokens": 9, "seed": 7, "stream": True, "stream_options": USAGE} | MESSAGES
    with httpx.Client(base_url=instance.url, timeout=30, verify=NO_CERTIFICATES) as http:
        whole = http.post(CHAT, json=body).text
        chunks = check_events(whole)
        first = next(line.removeprefix("id: ") for line in whole.split("\n") if line.startswith("id: "))
        place = msgspec.structs.replace(parse_cursor(first), choices=[ChoiceCursor(3)], new_tokens={})
        rest = check_events(http.post(CHAT, json=body, headers={"last-event-id": format_cursor(place)}).text)
    assert said_in(rest) == said_in(chunks)[3:] != ""


def test_the_look_is_strict(instance: Instance) -> None:
    body = {"model": "small-model", "max_tokens": 2, "return_token_ids": True} | MESSAGES
    answer = httpx.post(instance.url + CHAT, json=body, timeout=30, verify=NO_CERTIFICATES).json()
    with pytest.raises(AssertionError):
        check_answer(answer)
    check_answer(answer, IDS)
    for broken in ({"created": "today"}, {"usage": {"prompt_tokens": 1}}, {"choices": [{"index": "0"}]}):
        with pytest.raises(ValidationError):
            check_answer(answer | broken, IDS)


@pytest.mark.parametrize(("path", "fields"), [(CHAT, MESSAGES), (COMPLETIONS, {"prompt": "x"})])
def test_an_answer_that_was_given_up_has_fields_of_ours_and_else_openais(
    instance: Instance, path: str, fields: dict[str, Any]
) -> None:
    given_up = ErrorInfo("pd_preempted", "PD Error: out of blocks", 503, True)
    instance.engine.give_up = lambda sampling, position: given_up if position == 3 else None
    body = {"model": "small-model", "max_tokens": 5} | fields
    ours = frozenset({"completion_token_ids", "num_text_tokens", "error", "seed", "resume", RESCHEDULE})
    with httpx.Client(base_url=instance.url, timeout=30, verify=NO_CERTIFICATES) as http:
        whole = http.post(path, json=body).json()
        chunks = check_events(http.post(path, json=body | {"stream": True}).text, ours)
    check_answer(whole, ours)
    assert whole["choices"][0]["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == RESCHEDULE


BAD: list[tuple[str, Any, int, str | None]] = [
    (CHAT, MESSAGES | {"temperature": -1}, 400, "temperature"),
    (CHAT, MESSAGES | {"model": "absent"}, 404, "model"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, [], 400, None),
    (COMPLETIONS, {"prompt": "x", "n": 0}, 400, "n"),
    ("/v1/responses", {"input": "x", "top_p": 7}, 400, "top_p"),
    ("/v1/embeddings", {"input": []}, 400, "input"),
    ("/v1/rerank", {"query": "x"}, 400, "documents"),
    ("/v1/absent", {}, 404, None),
]


@pytest.mark.parametrize(("path", "fields", "status", "param"), BAD, ids=range(len(BAD)))
def test_refusals_are_as_the_openai_package_says(
    instance: Instance, path: str, fields: Any, status: int, param: str | None
) -> None:
    body = {"model": "small-model"} | fields if isinstance(fields, dict) else fields
    answer = httpx.post(instance.url + path, json=body, timeout=30, verify=NO_CERTIFICATES)
    error = check_error(answer.json())
    assert (answer.status_code, error.param) == (status, param)
    assert error.message and error.type


@pytest.mark.parametrize(("path", "fields"), [(CHAT, MESSAGES), (COMPLETIONS, {"prompt": "x"})])
def test_the_error_of_an_answer_that_was_given_up_is_as_the_openai_package_says(
    instance: Instance, path: str, fields: dict[str, Any]
) -> None:
    fault = ErrorInfo("internal", "the logits are not finite", 500, True)
    instance.engine.give_up = lambda sampling, position: fault if position == 3 else None
    body = {"model": "small-model", "max_tokens": 5, "stream": True} | fields
    text = httpx.post(instance.url + path, json=body, timeout=30, verify=NO_CERTIFICATES).text
    data = [msgspec.json.decode(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert check_error({"error": data[-1]["choices"][0]["error"]}).message == fault.message
