"""The real openai package's responses against a real api process."""

import json
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage

from onward.proto.engine import ErrorInfo
from tests.api.instance import Instance
from tests.api.responses.reading import THINKING, TOOLS, check_response, speak_until
from tests.api.small_model import END_OF_THOUGHT
from tests.api.thinking_model import CALL, speak, tokens_of

MODEL = "small-model"


class Answer(pydantic.BaseModel):
    a: int


def test_a_response_is_created_and_has_its_text(keeper: Instance, client: openai.OpenAI) -> None:
    speak(keeper, tokens_of("hélló"))
    response = client.responses.create(model=MODEL, input="hi", instructions="be brief", metadata={"k": "v"}, user="me")
    assert (response.output_text, response.status, response.error) == ("hélló", "completed", None)
    assert (response.instructions, response.metadata, response.user) == ("be brief", {"k": "v"}, "me")
    assert response.usage is not None and response.usage.output_tokens == len("hélló".encode()) + 1
    prompt = bytes(one for one in keeper.engine.submits[-1].prompt_token_ids if one < 256).decode()
    assert prompt.startswith("system\nbe brief") and "user\nhi" in prompt


def test_the_stream_helper_builds_the_same_response(keeper: Instance, client: openai.OpenAI) -> None:
    speak(keeper, tokens_of("hm", END_OF_THOUGHT, "wörds ", CALL))
    with client.responses.stream(model=MODEL, input="hi", extra_body=THINKING, **TOOLS) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert deltas == final.output_text == "wörds "
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    again = client.responses.retrieve(final.id)
    assert [item.id for item in again.output] == [item.id for item in final.output]
    assert (again.output_text, again.usage) == (final.output_text, final.usage)


def test_a_stream_is_followed_from_an_event_on(keeper: Instance, client: openai.OpenAI) -> None:
    speak(keeper, tokens_of("one two"))
    events = list(client.responses.create(model=MODEL, input="hi", stream=True))
    assert events[0].type == "response.created"
    response_id = events[0].response.id
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=events[3].sequence_number))
    assert rest == events[4:]


def test_structure_is_parsed_into_a_model(keeper: Instance, client: openai.OpenAI) -> None:
    speak(keeper, tokens_of('{"a": 3}'))
    response = client.responses.parse(model=MODEL, input="hi", text_format=Answer)
    assert response.output_parsed == Answer(a=3)
    grammar = keeper.engine.submits[-1].sampling_params.grammar
    assert grammar is not None and json.loads(grammar.source)["properties"]["a"]["type"] == "integer"


def test_a_call_is_answered_and_the_talk_goes_on(keeper: Instance, client: openai.OpenAI) -> None:
    speak(keeper, tokens_of(CALL))
    first = client.responses.create(model=MODEL, input=[{"role": "user", "content": "hi"}], **TOOLS)
    [call] = first.output
    assert isinstance(call, ResponseFunctionToolCall) and (call.name, call.arguments) == ("f", '{"a":1}')
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    speak(keeper, tokens_of("fine"))
    by_id = client.responses.create(model=MODEL, input=[output], previous_response_id=first.id, **TOOLS)
    by_items = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": "hi"}, call.to_dict(), output], **TOOLS
    )
    assert by_id.output_text == by_items.output_text == "fine"
    prompts = [one.prompt_token_ids for one in keeper.engine.submits[-2:]]
    assert prompts[0] == prompts[1], "it is the same talk, whoever remembers it"
    text = bytes(one for one in prompts[0] if one < 256).decode()
    assert text.index("user\nhi") < text.index("<tool_call>") < text.index("tool\nsunny")


def test_earlier_responses_are_remembered_without_their_instructions(keeper: Instance, client: openai.OpenAI) -> None:
    speak(keeper, tokens_of("one"))
    first = client.responses.create(model=MODEL, input="1?", instructions="secret")
    speak(keeper, tokens_of("two"))
    second = client.responses.create(model=MODEL, input="2?", previous_response_id=first.id)
    speak(keeper, tokens_of("three"))
    third = client.responses.create(model=MODEL, input="3?", previous_response_id=second.id)
    text = bytes(one for one in keeper.engine.submits[-1].prompt_token_ids if one < 256).decode()
    places = [text.index(word) for word in ("1?", "one", "2?", "two", "3?")]
    assert places == sorted(places) and "secret" not in text
    items = client.responses.input_items.list(third.id, order="asc", limit=2)
    assert [item.type for item in items.data] == ["message"] * 2 and items.has_more
    every = list(client.responses.input_items.list(third.id, limit=2))
    assert len(every) == 5, "page by page"
    assert isinstance(every[1], ResponseOutputMessage), "the latest first"


def test_a_response_repeats_what_it_was_asked_for_and_names_what_it_was_not(
    keeper: Instance, client: openai.OpenAI
) -> None:
    speak(keeper, tokens_of("hé"))
    plain = client.responses.create(model=MODEL, input="hi").to_dict()
    check_response(plain)
    assert (plain["store"], plain["service_tier"], plain["presence_penalty"]) == (True, "default", 0.0)
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    full = client.responses.create(
        model=MODEL,
        input="hi",
        store=False,
        service_tier="flex",
        safety_identifier="user-7",
        prompt_cache_key="chat-3",
        tools=[{**tool, "strict": True}, {"type": "function", "name": "g"}],  # type: ignore[list-item]
        tool_choice="none",
        extra_body={"presence_penalty": 0.5, "frequency_penalty": -1},
    ).to_dict()
    check_response(full)
    assert (full["store"], full["service_tier"], full["safety_identifier"]) == (False, "default", "user-7")
    assert (full["prompt_cache_key"], full["presence_penalty"], full["frequency_penalty"]) == ("chat-3", 0.5, -1)
    assert full["tools"] == [
        {**tool, "strict": True, "description": None},
        {"type": "function", "name": "g", "parameters": None, "strict": None, "description": None},
    ]


def test_a_request_as_coding_agents_send_it_is_served_and_its_reasoning_can_be_sent_back(
    keeper: Instance, client: openai.OpenAI
) -> None:
    """Agents store nothing and ask for sealed reasoning. They get the reasoning itself, and send it back."""
    asked: Any = {
        "model": MODEL,
        "instructions": "You are a coding agent.",
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "service_tier": "priority",
        "prompt_cache_key": "chat-3",
        "text": {"verbosity": "medium"},
        "extra_body": {"client_metadata": {"installation": "a"}, **THINKING},
        **TOOLS,
    }
    speak(keeper, tokens_of("hm", END_OF_THOUGHT, CALL))
    hello: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    *_, last = client.responses.create(input=[hello], stream=True, **asked)
    assert last.type == "response.completed"
    check_response(last.response.to_dict())
    reasoning, call = (item.to_dict() for item in last.response.output)
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}] and reasoning["summary"] == []
    speak(keeper, tokens_of("hm", END_OF_THOUGHT, "done"))
    output: Any = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    again = client.responses.create(input=[hello, reasoning, call, output], **asked)  # type: ignore[list-item]
    assert again.output_text == "done"


def test_the_tokens_of_a_prompt_are_counted_as_they_are_computed(keeper: Instance, client: openai.OpenAI) -> None:
    speak(keeper, tokens_of("hé"))
    first = client.responses.create(model=MODEL, input="hi", instructions="be brief", **TOOLS)
    asked: Any = {"model": MODEL, "input": "and then?", "previous_response_id": first.id, **TOOLS}
    client.responses.create(**asked)
    count = client.responses.input_tokens.count(**asked)
    assert (count.input_tokens, count.object) == (
        len(keeper.engine.submits[-1].prompt_token_ids),
        "response.input_tokens",
    )
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.input_tokens.count(model=MODEL, input="x", previous_response_id="resp_" + "0" * 32)
    assert unknown.value.param == "previous_response_id"
    for fields, param in (({"input": []}, "input"), ({"tools": [{"type": "web_find"}]}, "tools[0].type")):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.input_tokens.count(**{"model": MODEL, "input": "x", **fields})  # type: ignore[arg-type]
        assert refused.value.param == param
    with pytest.raises(openai.BadRequestError) as too_long:
        client.responses.input_tokens.count(model=MODEL, input="x" * 100_000)
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "input")


def test_logprobs_come_where_they_are_asked_for(keeper: Instance, client: openai.OpenAI) -> None:
    speak(keeper, tokens_of("hé"))
    response = client.responses.create(
        model=MODEL, input="hi", include=["message.output_text.logprobs"], top_logprobs=1
    )
    [message] = response.output
    assert isinstance(message, ResponseOutputMessage) and message.content[0].type == "output_text"
    scores = message.content[0].logprobs
    assert scores is not None
    assert bytes(byte for one in scores for byte in one.bytes) == "hé".encode()
    assert client.responses.retrieve(response.id) == response


def test_a_stream_that_fails_ends_with_what_has_failed(keeper: Instance, client: openai.OpenAI) -> None:
    speak_until(keeper, 5, tokens_of("one two three"))
    stream = client.responses.create(model=MODEL, input="hi", stream=True)
    keeper.wait_until(lambda: keeper.engine.paused)
    keeper.lose_requests(1, ErrorInfo("crashed_worker", "the worker is down", 500, False))
    keeper.engine.paused = False
    *_, last = stream
    keeper.engine.refusal = None
    assert last.type == "response.failed" and last.response.error is not None
    assert (last.response.error.code, last.response.error.type) == ("server_error", "crashed_worker")
    assert client.responses.retrieve(last.response.id).status == "failed"


def test_a_response_that_was_given_up_has_failed_and_no_reason_of_ours_shows(
    keeper: Instance, client: openai.OpenAI
) -> None:
    speak(keeper, tokens_of("one two"))
    given_up = ErrorInfo("pd_preempted", "PD Error: out of blocks", 503, True)
    keeper.engine.give_up = lambda sampling, position: given_up if position == 3 else None
    response = client.responses.create(model=MODEL, input="hi")
    assert (response.status, response.output_text) == ("failed", "one")
    assert response.error is not None and response.error.type == "pd_preempted"
    *_, last = client.responses.create(model=MODEL, input="hi", stream=True)
    assert last.type == "response.failed"
    assert "pd_reschedule" not in response.to_json() + last.to_json()


def test_an_error_before_the_first_event_is_one_of_http(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="other", input="hi", stream=True)
    assert caught.value.code == "model_not_found"
