"""Every answer and every chunk is what the openai package's types say, strictly."""

from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from onward.proto.request import ErrorInfo
from tests.api.instance import Instance
from tests.api.reader import NO_CERTIFICATES
from tests.api.strict_types import RESCHEDULE, check_answer, check_events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
IDS = frozenset({"token_ids", "prompt_token_ids"})
SCORES = frozenset({"prompt_logprobs"})
USAGE = {"include_usage": True, "continuous_usage_stats": True}

ASKED: list[tuple[str, dict[str, Any], frozenset[str]]] = [
    (CHAT, MESSAGES | {"n": 2, "logprobs": True, "top_logprobs": 2}, frozenset()),
    (CHAT, MESSAGES | {"stop": "e", "max_tokens": 40, "prompt_logprobs": 1}, SCORES),
    (CHAT, MESSAGES | {"return_token_ids": True}, IDS),
    (COMPLETIONS, {"prompt": "x", "logprobs": 2, "n": 2}, frozenset()),
    (COMPLETIONS, {"prompt": ["x", "y"], "echo": True, "logprobs": 0}, frozenset()),
    (COMPLETIONS, {"prompt": [[97], [98]], "return_token_ids": True, "prompt_logprobs": 0}, IDS | SCORES),
]


@pytest.mark.parametrize(("path", "fields", "ours"), ASKED, ids=lambda value: str(value)[:50])
def test_answers_and_chunks_are_as_the_openai_package_says(
    instance: Instance, path: str, fields: dict[str, Any], ours: frozenset[str]
) -> None:
    body = {"model": "small-model", "max_tokens": 5, "seed": 7} | fields
    with httpx.Client(base_url=instance.url, timeout=30, verify=NO_CERTIFICATES) as http:
        check_answer(http.post(path, json=body).json(), ours)
        streamed = http.post(path, json=body | {"stream": True, "stream_options": USAGE}).text
    chunks = check_events(streamed, ours)
    assert chunks[-1]["choices"] == [] and all(chunk["usage"] is not None for chunk in chunks)


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
    ours = frozenset({"completion_token_ids", "error", "seed", "resume", RESCHEDULE})
    with httpx.Client(base_url=instance.url, timeout=30, verify=NO_CERTIFICATES) as http:
        whole = http.post(path, json=body).json()
        chunks = check_events(http.post(path, json=body | {"stream": True}).text, ours)
    check_answer(whole, ours)
    assert whole["choices"][0]["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == RESCHEDULE
