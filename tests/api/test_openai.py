"""Requests as bytes: whatever comes, it is understood or refused by name."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.api.requests.decoding import decode_chat, decode_completion, decode_tokens
from onward.api.requests.schemas import ChatCompletionRequest, CompletionRequest, GenerateRequest, ValidationContext
from onward.errors import ClientError

BOUNDS = ValidationContext("m", 320, 4)
MESSAGES = [{"role": "user", "content": "hi"}]
REQUESTS = (ChatCompletionRequest, CompletionRequest, GenerateRequest)
FIELDS = sorted({name for request in REQUESTS for name in request.__struct_fields__} | {"tools", "echo", "x"})

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def chat(**fields: Any) -> ChatCompletionRequest:
    return decode_chat(json.dumps({"model": "m", "messages": MESSAGES} | fields).encode(), BOUNDS)[0]


@settings(deadline=None)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=4))
def test_whatever_the_fields_hold_the_request_is_understood_or_refused(fields: dict[str, Any]) -> None:
    required = ({"messages": MESSAGES}, {"prompt": "x"}, {"prompt_token_ids": [1]})
    for decode, own in zip((decode_chat, decode_completion, decode_tokens), required, strict=True):
        try:
            decode(json.dumps({"model": "m"} | own | fields).encode(), BOUNDS)
        except ClientError as error:
            assert error.message


@settings(deadline=None)
@given(body=st.binary(max_size=40) | st.text(alphabet='{}[]",:\\ud8 0', max_size=40).map(str.encode))
def test_whatever_the_bytes_are_they_are_refused(body: bytes) -> None:
    with pytest.raises(ClientError):
        decode_chat(body, BOUNDS)


@pytest.mark.parametrize("escape", [r"\ud800", r"\ud800 and more text", r"\udc00\ud800", r"\ud800\u0041"])
def test_half_a_surrogate_pair_is_refused(escape: str) -> None:
    body = '{"model": "m", "prompt": "%s"}' % escape  # noqa: UP031 (braces)
    with pytest.raises(ClientError):
        decode_completion(body.encode(), BOUNDS)


def test_null_is_the_same_as_absent() -> None:
    names = [name for name in ChatCompletionRequest.__struct_fields__ if name not in ("model", "messages")]
    assert chat(**dict.fromkeys(names)) == chat()


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).max_output_tokens == 7
    assert chat(max_tokens=5).max_output_tokens == 5
    assert chat().max_output_tokens is None


def test_one_stop_string_or_several() -> None:
    assert chat(stop="a").stop_strings() == ["a"]
    assert chat(stop=["a", "b"]).stop_strings() == ["a", "b"]
    assert chat().stop_strings() == []


def test_the_tokens_so_far_are_one_list_per_choice() -> None:
    assert chat().prior_token_ids() == [[]]
    assert chat(n=2).prior_token_ids() == [[], []]
    assert chat(generated_token_ids=[1, 2]).prior_token_ids() == [[1, 2]]
    assert chat(n=2, generated_token_ids=[[1], []]).prior_token_ids() == [[1], []]


def test_the_bounds_themselves_are_allowed() -> None:
    request = chat(temperature=2, top_p=1, min_p=1, top_k=-1, n=4, seed=2**63 - 1, stop=["x"] * 16)
    assert (request.temperature, request.num_choices) == (2.0, 4)
    assert chat(logprobs=True, top_logprobs=20, prompt_logprobs=0, repetition_penalty=10, presence_penalty=-2)
    assert chat(logit_bias={"0": -100, "319": 100}, bad_words=["x" * 128] * 128, frequency_penalty=2)
    assert chat(temperature=0, min_p=0, top_k=0, seed=-(2**63), priority=-(2**31), deadline_ms=1)


def test_how_many_logprobs_are_asked_for() -> None:
    assert chat().num_logprobs is chat(logprobs=False, top_logprobs=0).num_logprobs is None
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).num_logprobs == 5
    for asked in (None, 0, 5):
        body = json.dumps({"model": "m", "prompt_token_ids": [1], "logprobs": asked}).encode()
        assert decode_completion(body, BOUNDS)[0].num_logprobs == asked
        assert decode_tokens(body, BOUNDS)[0].num_logprobs == asked


def test_unknown_fields_are_named() -> None:
    body = {"model": "m", "messages": MESSAGES, "frobnicate": 1, "user": "me", "tools": []}
    assert decode_chat(json.dumps(body).encode(), BOUNDS)[1] == ("frobnicate",)
