"""Structured output with the real model: valid when it is left alone, and the same when it is not."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from tests.e2e.pd_instances import SMALL, Pair, ended
from tests.e2e.server import Server
from tests.e2e.streams import Stream, run_streams

MODEL = "smollm2-135m-instruct"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 1, "maxLength": 24},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2030},
        "tags": {"type": "array", "items": {"enum": ["sea", "land", "sky"]}, "minItems": 1, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["title", "year", "tags", "more"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "book", "schema": SCHEMA, "strict": True}}
TOPICS = ["rivers", "glass", "bread", "sails", "moths", "iron", "chess", "snow"]


def body(index: int, **fields: Any) -> dict[str, Any]:
    question = f"{index}. Make up a book about {TOPICS[index % len(TOPICS)]}, as JSON."
    common = {"model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 120}
    return common | {"temperature": 1.0, "seed": index, "response_format": FORMAT} | fields


BODIES = [body(index) for index in range(8)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*SMALL) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[tuple]:
    return [stream.result() for stream in run_streams(server.url, BODIES)]


def test_answers_that_end_by_themselves_satisfy_the_schema(undisturbed: list[tuple]) -> None:
    for text, _, reasons, _ in undisturbed:
        assert reasons == ["stop"]
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("role", ["worker", pytest.param("engine", marks=pytest.mark.full)])
def test_they_are_the_same_when_a_process_is_killed(server: Server, undisturbed: list[tuple], role: str) -> None:
    pid, killed = server.pid(role), False

    def kill(streams: list[Stream]) -> None:
        nonlocal killed
        if not killed and min(len(stream.token_ids) for stream in streams) >= 4:
            os.kill(pid, signal.SIGKILL)
            killed = True

    streams = run_streams(server.url, BODIES, kill)
    assert killed
    assert [stream.result() for stream in streams] == undisturbed


@pytest.mark.full
def test_they_are_the_same_when_they_are_preempted(undisturbed: list[tuple]) -> None:
    with Server(*SMALL, "--num-kv-blocks", "24", "--max-model-len", "384") as small:
        streams = run_streams(small.url, BODIES)
        assert small.metrics()["onward_preemptions_total"] >= 1
    assert [stream.result() for stream in streams] == undisturbed


@pytest.mark.full
def test_they_are_the_same_when_another_instance_computes_the_prompts(undisturbed: list[tuple]) -> None:
    with Pair() as pair:
        streams = run_streams(pair.decode.url, BODIES)
        choice = pair.decode.post("/v1/chat/completions", body(0, response_format=None, guided_choice=["x", "y"]))
        arrived = ended(pair.decode, "arrived")
    assert [stream.result() for stream in streams] == undisturbed
    assert arrived > len(BODIES)
    assert choice[1]["choices"][0]["message"]["content"] in ("x", "y")
    assert choice[1]["choices"][0]["finish_reason"] == "stop"


def test_a_stream_that_goes_on_from_any_position_is_the_same(server: Server, undisturbed: list[tuple]) -> None:
    """As a client or a router does it: with the tokens so far, also with all of them."""
    text, token_ids, reasons, num_tokens = undisturbed[0]
    cuts = [*range(0, len(token_ids), 5), len(token_ids)]
    streams = run_streams(server.url, [body(0, generated_token_ids=token_ids[:cut]) for cut in cuts])
    for stream in streams:
        assert text.endswith(stream.text)
        assert (stream.token_ids, stream.finish_reasons) == (token_ids, reasons)
        assert stream.usage is not None
        assert stream.usage["completion_tokens"] == num_tokens


class Book(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    title: str = pydantic.Field(max_length=20)
    pages: int = pydantic.Field(ge=1, le=999)
    is_new: bool


def test_the_openai_package_reads_answers_into_models(server: Server) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        asked: Any = [{"role": "user", "content": "Make up a book."}]
        answer = client.chat.completions.parse(
            model=MODEL, messages=asked, response_format=Book, seed=3, temperature=1, max_tokens=120
        )
    book = answer.choices[0].message.parsed
    assert isinstance(book, Book)
    assert 1 <= book.pages <= 999


def test_a_call_that_must_be_made_has_arguments_that_validate(server: Server) -> None:
    asked: Any = [{"role": "user", "content": "Make up a book."}]
    fields: Any = {"model": MODEL, "messages": asked, "seed": 3, "temperature": 1, "max_tokens": 160}
    tools: Any = {"tools": [openai.pydantic_function_tool(Book)], "tool_choice": "required"}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.parse(**fields, **tools, parallel_tool_calls=False).choices[0]
        with client.chat.completions.stream(**fields, **tools, parallel_tool_calls=False) as stream:
            streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        [call] = choice.message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Book)
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert json.loads(whole.message.tool_calls[0].function.arguments) == json.loads(
        streamed.message.tool_calls[0].function.arguments
    )


@pytest.mark.parametrize(
    ("fields", "path", "word"),
    [
        ({"guided_json": {"contains": {}}}, "guided_json", "contains"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed"),
        (
            {"guided_json": {"type": "integer", "multipleOf": 9999991, "maximum": 98765432109876}},
            "guided_json",
            "compil",
        ),
        ({"guided_choice": ["a"], "generated_token_ids": [5]}, "generated_token_ids[0]", "not allowed"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_any_work(
    server: Server, fields: dict[str, Any], path: str, word: str
) -> None:
    status, answer = server.post("/v1/chat/completions", body(0, response_format=None) | fields)
    assert (status, answer["error"]["param"]) == (400, path)
    assert word in answer["error"]["message"]


@pytest.mark.full
def test_at_least_ninety_five_of_a_hundred_answers_at_temperature_1_end_by_themselves_and_are_valid(
    server: Server,
) -> None:
    streams = run_streams(server.url, [body(index, max_tokens=160) for index in range(100, 200)])
    ended = [stream for stream in streams if stream.finish_reasons == ["stop"]]
    for stream in ended:
        jsonschema.validate(json.loads(stream.text), SCHEMA)
    assert len(ended) >= 95


def test_an_answer_that_is_cut_by_its_length_is_the_beginning_of_a_valid_one(
    server: Server, undisturbed: list[tuple]
) -> None:
    [stream] = run_streams(server.url, [body(1, max_tokens=9)])
    assert stream.finish_reasons == ["length"]
    assert undisturbed[1][0].startswith(stream.text)
