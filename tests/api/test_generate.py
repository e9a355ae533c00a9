"""Token ids in, token ids out: streaming and not, with a tokenizer and without, with and without the internal adapter."""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from onward.config import ApiConfig
from onward.proto.cursor import parse_cursor
from onward.proto.model import PreparedModel
from onward.proto.sampling_params import SamplingParams
from tests.api.instance import Instance, running
from tests.api.reader import ask, request
from tests.api.small_model import EOS
from tests.api.stand_in_engine import expected_tokens, hashed_token

PROMPT = [5, 6, 7]
FIELDS = {"model": "small-model", "prompt_token_ids": PROMPT, "seed": 7}


@pytest.fixture(scope="module")
def adapted_instance(model: PreparedModel) -> Iterator[Instance]:
    """Without a tokenizer and a template, and with the internal adapter."""
    bare = msgspec.structs.replace(model, tokenizer=None, chat_template=None)
    with running(bare, ApiConfig(internal_adapter=True)) as instance:
        yield instance


@pytest.fixture
def adapted(adapted_instance: Instance) -> Iterator[Instance]:
    yield adapted_instance
    adapted_instance.engine.choose = hashed_token


def generate(instance: Instance, **fields: Any) -> dict[str, Any]:
    response = httpx.post(f"{instance.url}/v1/generate", json=FIELDS | fields, timeout=30)
    assert response.status_code == 200, response.text
    return response.json()


def stream(instance: Instance, **fields: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """The events, and their cursors."""
    with httpx.stream(
        "POST", f"{instance.url}/v1/generate", json=FIELDS | fields | {"stream": True}, timeout=30
    ) as response:
        lines = list(response.iter_lines())
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    cursors = [parse_cursor(line.removeprefix("id: ")) for line in lines if line.startswith("id: ")]
    return [msgspec.json.decode(one) for one in data[:-1]], cursors


def shown(events: list[dict[str, Any]]) -> list[int]:
    return [token_id for event in events for choice in event["choices"] for token_id in choice["token_ids"]]


def in_cursors(cursors: list[Any]) -> list[int]:
    return [token_id for cursor in cursors for token_id in cursor.new_tokens.get(0, [])]


def test_tokens_in_and_tokens_out(instance: Instance) -> None:
    answer = generate(instance, max_tokens=6, n=2, logprobs=1)
    assert (answer["object"], answer["model"], answer["id"][:4]) == ("generate", "small-model", "gen-")
    for choice in answer["choices"]:
        tokens = expected_tokens(PROMPT, SamplingParams(7, choice["index"]), 6)
        assert (choice["token_ids"], choice["finish_reason"]) == (tokens, "length")
        assert [one["token_id"] for one in choice["logprobs"]] == tokens
        assert choice["logprobs"][1]["top_logprobs"] == [{"token_id": tokens[1], "logprob": -1.0}]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 12,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert instance.engine.submits[-1].prompt_token_ids == PROMPT


def test_a_stream_of_tokens_has_cursors_and_says_the_same(instance: Instance) -> None:
    events, cursors = stream(instance, max_tokens=6, stream_options={"include_usage": True})
    tokens = expected_tokens(PROMPT, SamplingParams(7), 6)
    assert shown(events) == in_cursors(cursors) == tokens
    assert {event["object"] for event in events} == {"generate.chunk"}
    assert events[-1]["usage"]["completion_tokens"] == 6
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert cursors[-1].choices[0].finish_reason == "length"


def test_tokens_of_an_earlier_attempt_are_continued(instance: Instance) -> None:
    tokens = expected_tokens(PROMPT, SamplingParams(7), 6)
    answer = generate(instance, max_tokens=6, generated_token_ids=tokens[:4])
    assert answer["choices"][0]["token_ids"] == tokens[4:]
    assert answer["usage"]["completion_tokens"] == 6


def test_without_the_adapter_the_end_token_is_shown(instance: Instance) -> None:
    instance.engine.choose = lambda prompt, sampling, tokens: EOS if len(tokens) == 3 else 97
    assert generate(instance)["choices"][0] == {
        "index": 0,
        "token_ids": [97, 97, 97, EOS],
        "logprobs": None,
        "finish_reason": "stop",
    }


def test_a_stop_string_ends_tokens_too_where_there_is_a_tokenizer(instance: Instance) -> None:
    instance.engine.choose = lambda prompt, sampling, tokens: b"one two three"[len(tokens)]
    [choice] = generate(instance, stop="tw", max_tokens=13)["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([*b"one tw"], "stop")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"stop": "x"}, "stop"), ({"stop_regex": "x"}, "stop_regex"), ({"bad_words": ["x"]}, "bad_words")],
)
def test_without_a_tokenizer_what_needs_text_is_refused(adapted: Instance, fields: dict[str, Any], param: str) -> None:
    response = httpx.post(f"{adapted.url}/v1/generate", json=FIELDS | fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param and "no tokenizer" in error["message"]


def test_the_adapter_leaves_the_end_token_out_of_what_is_shown_and_of_nothing_else(adapted: Instance) -> None:
    adapted.engine.choose = lambda prompt, sampling, tokens: EOS if len(tokens) == 3 else 97
    answer = generate(adapted, logprobs=0)
    [choice] = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([97, 97, 97], "stop")
    assert [one["token_id"] for one in choice["logprobs"]] == [97, 97, 97]
    assert answer["usage"]["completion_tokens"] == 4
    events, cursors = stream(adapted, stream_options={"include_usage": True})
    assert (shown(events), in_cursors(cursors)) == ([97, 97, 97], [97, 97, 97, EOS])
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["usage"]["completion_tokens"] == 4
    assert cursors[-1].choices[0].position == 4


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 5}])
def test_an_end_token_in_mid_stream_is_shown_with_the_adapter_too(adapted: Instance, fields: dict[str, Any]) -> None:
    output = [97, EOS, 98, EOS, 99, 100]
    adapted.engine.choose = lambda prompt, sampling, tokens: output[len(tokens)]
    assert generate(adapted, max_tokens=6, **fields)["choices"][0]["token_ids"] == output
    assert shown(stream(adapted, max_tokens=6, **fields)[0]) == output


def test_a_token_that_stops_a_request_by_its_own_wish_is_left_out_as_well(adapted: Instance) -> None:
    adapted.engine.choose = lambda prompt, sampling, tokens: 65 if len(tokens) == 2 else 97
    [choice] = generate(adapted, stop_token_ids=[65])["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([97, 97], "stop")


def test_an_output_that_ended_by_its_length_is_shown_whole_with_the_adapter(adapted: Instance) -> None:
    assert len(generate(adapted, max_tokens=4)["choices"][0]["token_ids"]) == 4


def test_given_tokens_that_have_ended_finish_without_the_engine(adapted: Instance) -> None:
    before = len(adapted.engine.submits)
    answer = generate(adapted, generated_token_ids=[97, EOS])
    assert answer["choices"][0] == {"index": 0, "token_ids": [], "logprobs": None, "finish_reason": "stop"}
    assert answer["usage"]["completion_tokens"] == 2
    assert len(adapted.engine.submits) == before


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_adapter_holds_for_returned_token_ids_too(model: PreparedModel, path: str) -> None:
    with running(model, ApiConfig(internal_adapter=True)) as instance:
        instance.engine.choose = lambda prompt, sampling, tokens: EOS if len(tokens) == 3 else 97
        for streaming in (False, True):
            body = request(path, streaming, return_token_ids=True)
            answer = ask(instance.url, path, body)
            assert (answer.choices[0].returned_token_ids, answer.reasons) == ([97, 97, 97], ["stop"])
            assert answer.usage is not None and answer.usage["completion_tokens"] == 4
            assert not streaming or answer.choices[0].token_ids == [97, 97, 97, EOS], "cursors have it"
