"""Tools and thinking from the request to the answer: what the model is told, what a client reads, what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from onward.api.requests.validation import MAX_THINKING_BUDGET
from onward.proto.sampling_params import MAX_GRAMMAR_BYTES
from onward.web.openai_api.tools import MAX_SCHEMA_BYTES
from tests.api import small_model
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES
from tests.api.small_model import END_OF_THOUGHT
from tests.api.strict_types import check_answer, check_events
from tests.api.thinking_model import (
    CALL,
    FORCED_CALL,
    SECOND_CALL,
    TOOL,
    prepare,
    speak,
    thinking_instance,
    tokens_of,
)

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
NAMED = {"type": "function", "function": {"name": "f"}}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


def large_tool(name: str, num_bytes: int) -> dict[str, Any]:
    schema = {"type": "object", "description": ""}
    padding = "x" * (num_bytes - len(json.dumps(schema, separators=(",", ":"))))
    return {"type": "function", "function": {"name": name, "parameters": schema | {"description": padding}}}


LARGE_TOOLS = [large_tool(name, MAX_SCHEMA_BYTES) for name in "abc"]
"""Each within its bound, and together too much for a grammar."""


class Book(BaseModel):
    title: str
    pages: int


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with thinking_instance(prepare(tmp_path_factory.mktemp("thinking-model"))) as instance:
        yield instance


@pytest.fixture
def client(thinker: Instance) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def post(instance: Instance, **fields: Any) -> httpx.Response:
    body = {"model": "small-model", "messages": MESSAGES, "max_tokens": 200, "tools": [TOOL]} | fields
    return httpx.post(instance.url + CHAT, json=body, timeout=30, verify=NO_CERTIFICATES)


def answer(instance: Instance, **fields: Any) -> dict[str, Any]:
    response = post(instance, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def prompt_of(instance: Instance) -> str:
    return bytes(token for token in instance.engine.submits[-1].prompt_token_ids if token < 256).decode()


def test_a_call_is_told_as_a_call(thinker: Instance) -> None:
    speak(thinker, tokens_of("words", CALL, SECOND_CALL))
    choice = answer(thinker)
    calls = choice["message"]["tool_calls"]
    assert choice["message"]["content"] == "words"
    assert [call["function"] for call in calls] == [
        {"name": "f", "arguments": '{"a":1}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert len({call["id"] for call in calls}) == 2
    assert choice["finish_reason"] == "tool_calls"


def test_the_model_is_told_of_tools_only_where_it_may_call_them(thinker: Instance) -> None:
    speak(thinker, tokens_of(CALL))
    answer(thinker)
    assert "tools: f\n" in prompt_of(thinker)
    choice = answer(thinker, tool_choice="none")
    assert "tools" not in prompt_of(thinker)
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


def test_a_template_that_knows_no_tools_has_them_told_in_words(tmp_path: Path) -> None:
    with running(small_model.prepare(tmp_path, max_model_len=1024)) as instance:
        speak(instance, tokens_of('[{"name": "f", "arguments": {"a": 1}}]'))
        choice = answer(instance)
        assert '{"name": "f", "parameters"' in prompt_of(instance)
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]


def test_earlier_calls_and_their_results_go_back_to_the_template(thinker: Instance) -> None:
    speak(thinker, tokens_of("done"))
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    history = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ]
    answer(thinker, messages=[*MESSAGES, *history])
    assert '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' in prompt_of(thinker)
    assert "tool\n42" in prompt_of(thinker)


def test_an_answer_that_must_call_is_bound_to_a_grammar_of_the_tools(thinker: Instance) -> None:
    speak(thinker, tokens_of(f"[{FORCED_CALL}]"))
    required = answer(thinker, tool_choice="required")
    grammar = thinker.engine.submits[-1].sampling_params.grammar
    assert grammar is not None
    assert json.loads(grammar.source)["minItems"] == 1
    assert required["finish_reason"] == "tool_calls"
    named = answer(thinker, tool_choice=NAMED)
    assert named["finish_reason"] == "stop", "there was no choice to report"
    for choice in (required, named):
        assert choice["message"]["content"] is None
        [call] = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_without_parallel_calls_the_answer_ends_behind_the_first(thinker: Instance) -> None:
    speak(thinker, tokens_of(CALL, SECOND_CALL))
    choice = answer(thinker, parallel_tool_calls=False)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]
    assert choice["finish_reason"] == "tool_calls"
    thinker.wait_until(lambda: not thinker.engine.running)


def test_what_ended_with_a_call_is_not_run_again(thinker: Instance) -> None:
    speak(thinker, tokens_of(CALL))
    before = len(thinker.engine.submits)
    choice = answer(thinker, generated_token_ids=tokens_of(CALL), generated_finish_reasons=["tool_calls"])
    assert (choice["finish_reason"], len(thinker.engine.submits)) == ("tool_calls", before)


def test_thoughts_are_no_words(thinker: Instance) -> None:
    speak(thinker, tokens_of("hm", END_OF_THOUGHT, "\n\nyes"))
    message = answer(thinker, tools=None, **THINKING)["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    message = answer(thinker, tools=None, reasoning_effort="none")["message"]
    assert "reasoning_content" not in message
    assert "<think>" not in prompt_of(thinker)


def test_a_message_that_is_gone_on_with_has_begun_to_answer(thinker: Instance) -> None:
    speak(thinker, tokens_of("<think>b"))
    begun = [*MESSAGES, {"role": "assistant", "content": "a"}]
    message = answer(thinker, tools=None, messages=begun, continue_final_message=True)["message"]
    assert message["content"] == "<think>b"
    speak(thinker, tokens_of("hm", END_OF_THOUGHT, "yes"))
    begun = [*MESSAGES, {"role": "assistant", "content": "<think>"}]
    message = answer(thinker, tools=None, messages=begun, continue_final_message=True)["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")


def test_an_end_tag_that_min_tokens_forbids_is_refused_and_names_the_fields(thinker: Instance) -> None:
    before = len(thinker.engine.submits)
    fields = THINKING | {"tools": None, "thinking_budget": 3, "stop_token_ids": [END_OF_THOUGHT], "max_tokens": 20}
    for min_tokens in (5, 20):
        response = post(thinker, min_tokens=min_tokens, **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "stop_token_ids")
        assert "thinking_budget" in error["message"] and "min_tokens" in error["message"]
    assert len(thinker.engine.submits) == before
    speak(thinker, tokens_of("abcdefgh"))
    for min_tokens in (0, 4):
        message = answer(thinker, min_tokens=min_tokens, **fields)["message"]
        assert message["reasoning_content"] == "abc\n", "thinking alone may be asked for"


def test_a_budget_reaches_the_sampler(thinker: Instance) -> None:
    speak(thinker, tokens_of("abcdefgh"))
    message = answer(thinker, tools=None, thinking_budget=3, **THINKING)["message"]
    assert (message["reasoning_content"], message["content"]) == ("abc\n", "fgh")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"thinking_budget": MAX_THINKING_BUDGET + 1}, "thinking_budget"),
        ({"tools": LARGE_TOOLS, "tool_choice": "required"}, "tools"),
        ({"tools": [large_tool("f", MAX_SCHEMA_BYTES + 1)]}, "tools[0].function.parameters"),
        ({"response_format": SCHEMA_FORMAT}, "response_format.json_schema.schema"),
        ({"response_format": SCHEMA_FORMAT, "tool_choice": "required"}, "response_format.json_schema.schema"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [TOOL | {"type": "web"}]}, "tools[0].type"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "tool", "content": "42"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_wrong_is_named(thinker: Instance, fields: dict[str, Any], param: str) -> None:
    response = post(thinker, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_schemas_that_are_too_much_for_a_grammar_are_refused_by_their_size_and_else_taken(thinker: Instance) -> None:
    speak(thinker, tokens_of("words"))
    refused = post(thinker, tools=LARGE_TOOLS, tool_choice="required").json()["error"]
    assert str(MAX_GRAMMAR_BYTES) in refused["message"] and "required" in refused["message"]
    named = {"type": "function", "function": {"name": "b"}}
    assert post(thinker, tools=LARGE_TOOLS, tool_choice=named).status_code == 200
    assert post(thinker, tools=LARGE_TOOLS).status_code == 200


def test_thinking_is_counted_in_the_usage_streamed_or_not_and_also_in_an_answer_that_goes_on(thinker: Instance) -> None:
    output = tokens_of("hm", END_OF_THOUGHT, "\n\nyes")
    speak(thinker, output)
    details = {"reasoning_tokens": 2}
    asked = THINKING | {"tools": None}
    assert post(thinker, **asked).json()["usage"]["completion_tokens_details"] == details
    streamed = post(thinker, stream=True, stream_options={"include_usage": True}, **asked).text
    usages = [chunk["usage"] for chunk in check_events(streamed, frozenset({"reasoning_content"}))]
    assert usages[-1]["completion_tokens_details"] == details
    for given in (output[:1], output[:4]):
        again = post(thinker, generated_token_ids=given, **asked).json()["usage"]
        assert (again["completion_tokens"], again["completion_tokens_details"]) == (len(output) + 1, details)
    unthought = post(thinker, tools=None, reasoning_effort="none").json()["usage"]
    assert unthought["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_model_that_marks_no_thinking_has_none_counted(instance: Instance) -> None:
    assert "completion_tokens_details" not in post(instance, tools=None).json()["usage"]


def test_a_budget_is_refused_where_no_thinking_is_marked(instance: Instance) -> None:
    response = post(instance, tools=None, thinking_budget=5)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "thinking_budget")


def test_answers_and_chunks_are_as_the_openai_package_says(thinker: Instance) -> None:
    speak(thinker, tokens_of("hm", END_OF_THOUGHT, "words", CALL))
    ours = frozenset({"reasoning_content"})
    check_answer(post(thinker, **THINKING).json(), ours)
    chunks = check_events(post(thinker, stream=True, **THINKING).text, ours)
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": NAMED},
        {"tool_choice": "required", "n": 2, "parallel_tool_calls": False},
        {"tool_choice": "required", "logprobs": True, "top_logprobs": 1},
        {"tools": None, "response_format": SCHEMA_FORMAT},
        {"tools": None, "response_format": {"type": "json_object"}, "logprobs": True},
        {"tools": None, "guided_regex": ".*"},
    ],
    ids=lambda value: str(value)[:60],
)
def test_answers_that_are_bound_are_as_the_openai_package_says(thinker: Instance, fields: dict[str, Any]) -> None:
    speak(thinker, *[tokens_of(f"[{FORCED_CALL}]")] * 2)
    check_answer(post(thinker, **fields).json())
    streamed = post(thinker, stream=True, stream_options={"include_usage": True}, **fields).text
    chunks = check_events(streamed)
    reasons = [one["finish_reason"] for chunk in chunks for one in chunk["choices"] if one["finish_reason"]]
    assert set(reasons) == {"tool_calls" if fields.get("tool_choice") == "required" else "stop"}


def test_the_package_s_own_stream_helper_puts_calls_together(thinker: Instance, client: openai.OpenAI) -> None:
    speak(thinker, tokens_of("words", CALL, "\n", SECOND_CALL))
    with client.chat.completions.stream(model="small-model", messages=MESSAGES, tools=[TOOL], max_tokens=200) as stream:
        kinds = [event.type for event in stream]
        completion = stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 2
    message = completion.choices[0].message
    assert message.content == "words"
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls or []] == [
        ("f", '{"a":1}'),
        ("g", "{}"),
    ]
    assert completion.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"])
def test_the_stream_helper_puts_calls_together_that_must_be_made(
    thinker: Instance, client: openai.OpenAI, choice: Any, reason: str
) -> None:
    speak(thinker, tokens_of(f"[{FORCED_CALL}]"))
    with client.chat.completions.stream(
        model="small-model", messages=MESSAGES, tools=[TOOL], tool_choice=choice, max_tokens=200
    ) as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    [call] = final.message.tool_calls or []
    assert (call.function.name, final.finish_reason) == ("f", reason)
    assert call.function.arguments == "".join(pieces) == '{"a": 1}' and len(pieces) > 1


def test_the_package_parses_answers_into_models(thinker: Instance, client: openai.OpenAI) -> None:
    speak(thinker, tokens_of('{"title": "é", "pages": 3}'))
    completion = client.chat.completions.parse(
        model="small-model", messages=MESSAGES, response_format=Book, max_tokens=200
    )
    assert completion.choices[0].message.parsed == Book(title="é", pages=3)
    with client.chat.completions.stream(
        model="small-model", messages=MESSAGES, response_format=Book, max_tokens=200
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Book(title="é", pages=3)


def test_the_package_parses_calls_into_models(thinker: Instance, client: openai.OpenAI) -> None:
    speak(thinker, tokens_of('[{"name": "Book", "parameters": {"title": "x", "pages": 3}}]'))
    completion = client.chat.completions.parse(
        model="small-model",
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Book)],
        tool_choice="required",
        max_tokens=200,
    )
    [call] = completion.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Book(title="x", pages=3)


OLD = {"tools": None, "functions": [TOOL["function"]]}
"""The fields of a request in the older form."""


def test_a_client_that_sends_functions_gets_a_function_call(thinker: Instance) -> None:
    speak(thinker, tokens_of("words", CALL, SECOND_CALL))
    choice = answer(thinker, **OLD)
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"a":1}'}, "and no second call"
    assert (choice["message"]["content"], choice["finish_reason"]) == ("words", "function_call")
    assert "tool_calls" not in choice["message"]
    assert "tools: f\n" in prompt_of(thinker)


def test_a_stream_has_the_function_call_in_its_deltas(thinker: Instance, client: openai.OpenAI) -> None:
    speak(thinker, tokens_of(CALL))
    asked: dict[str, Any] = {"model": "small-model", "messages": MESSAGES, "max_tokens": 200, "stream": True}
    stream = client.chat.completions.create(**asked, functions=OLD["functions"], function_call="auto")
    choices = [chunk.choices[0] for chunk in stream]
    calls = [choice.delta.function_call for choice in choices if choice.delta.function_call is not None]
    assert calls[0].name == "f" and "".join(call.arguments or "" for call in calls) == '{"a":1}'
    assert choices[-1].finish_reason == "function_call"


def test_a_function_that_is_named_is_called(thinker: Instance) -> None:
    speak(thinker, tokens_of(FORCED_CALL))
    choice = answer(thinker, **OLD, function_call={"name": "f"})
    assert choice["message"]["function_call"]["name"] == "f"
    assert choice["finish_reason"] == "stop", "the model had no choice"


def test_older_calls_and_results_are_rendered_as_those_of_tools(thinker: Instance) -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    speak(thinker, tokens_of("ok"))
    older = [
        *MESSAGES,
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "f", "content": "5"},
    ]
    answer(thinker, messages=older)
    rendered = prompt_of(thinker)
    newer = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call00001", "function": function}]},
        {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "5"},
    ]
    answer(thinker, messages=newer)
    assert rendered == prompt_of(thinker) and "<tool_call>" in rendered


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_may_begin_with_the_last_message(thinker: Instance, streams: bool) -> None:
    speak(thinker, tokens_of("words"))
    messages = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "first "}]}]
    for more, expected in ((messages, "first words"), (MESSAGES, "words")):
        response = post(thinker, tools=None, echo=True, messages=more, stream=streams)
        assert response.status_code == 200, response.text
        if streams:
            chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
            text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        else:
            text = response.json()["choices"][0]["message"]["content"]
        assert text == expected


def test_a_role_that_the_template_renders_is_accepted(thinker: Instance) -> None:
    speak(thinker, tokens_of("ok"))
    answer(thinker, messages=[*MESSAGES, {"role": "critic", "content": "too long"}])
    assert "critic\ntoo long" in prompt_of(thinker)


def test_a_role_that_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    known = "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.content }}{% endif %}{% endfor %}"
    with running(small_model.prepare(tmp_path, template=known)) as instance:
        messages = [*MESSAGES, {"role": "critic", "content": "too long"}]
        response = post(instance, tools=None, messages=messages)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[1].role")
