from typing import Any

import msgspec
import pytest

from onward.errors import InvalidRequest
from onward.text.prompt_tokenizer import ChatMessage
from onward.web.openai_api.tools import (
    MAX_CALLS_PER_MESSAGE,
    MAX_DESCRIPTION_LENGTH,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    ResolvedTools,
    Tool,
    ToolChoice,
    check_tool_messages,
    resolve_tools,
)


class Fields(msgspec.Struct):
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | more}


def plan(**fields: Any) -> ResolvedTools:
    given = msgspec.convert(fields, Fields)
    return resolve_tools(given.tools, given.tool_choice, given.parallel_tool_calls)


def refused(**fields: Any) -> str | None:
    with pytest.raises(InvalidRequest) as fault:
        plan(**fields)
    assert fault.value.message.startswith(f"{fault.value.param}: ")
    return fault.value.param


NAMED = {"type": "function", "function": {"name": "g"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_tools_may_be_called_unless_the_request_says_otherwise() -> None:
    both = [tool("f"), tool("g")]
    assert plan() == ResolvedTools()
    assert plan(tools=[], tool_choice="auto") == ResolvedTools()
    assert plan(tools=both).tool_choice == "auto"
    assert plan(tools=both).names == {"f", "g"}
    assert plan(tools=both, tool_choice="required").is_forced
    named = plan(tools=both, tool_choice=NAMED)
    assert (named.tool_choice, named.names, len(named.tools)) == ("named", {"g"}, 2)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_some_of_the_tools_may_be_allowed(mode: str) -> None:
    some = plan(tools=[tool("f"), tool("g"), tool("h")], tool_choice=allowed(mode, "h", "f"))
    assert (some.tool_choice, some.is_forced) == (mode, mode == "required")
    assert some.names == {"f", "h"}
    assert [one["function"]["name"] for one in some.for_template() or []] == ["f", "g", "h"], (
        "the prompt stays the same"
    )


def test_a_model_that_must_not_call_is_not_told_of_tools() -> None:
    assert plan(tools=[tool()], tool_choice="none").for_template() is None


def test_calls_are_limited_to_one_where_asked_for_or_named() -> None:
    assert plan(tools=[tool()]).max_calls is None
    assert plan(tools=[tool()], parallel_tool_calls=True).max_calls is None
    assert plan(tools=[tool()], parallel_tool_calls=False).max_calls == 1
    assert plan(tools=[tool("g")], tool_choice=NAMED).max_calls == 1


def test_an_answer_that_stops_with_a_call_is_told_so() -> None:
    auto, named = plan(tools=[tool("g")]), plan(tools=[tool("g")], tool_choice=NAMED)
    assert auto.client_finish_reason("stop", True) == "tool_calls"
    assert auto.client_finish_reason("stop", False) == "stop"
    assert auto.client_finish_reason("length", True) == "length"
    assert auto.client_finish_reason(None, True) is None
    assert named.client_finish_reason("stop", True) == "stop"


def test_templates_get_tools_without_fields_that_were_not_sent() -> None:
    [shown] = plan(tools=[tool(description="d")]).for_template() or []
    empty = {"type": "object", "properties": {}}
    assert shown == {"type": "function", "function": {"name": "f", "description": "d", "parameters": empty}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [tool(), tool("a b")]}, "tools[1].function.name"),
        ({"tools": [tool("x" * 129)]}, "tools[0].function.name"),
        ({"tools": [tool(""), tool()]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(str(index)) for index in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool(parameters=nested(MAX_SCHEMA_DEPTH + 1))]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"title": "x" * MAX_SCHEMA_BYTES})]}, "tools[0].function.parameters"),
        ({"tools": [tool(description="x" * (MAX_DESCRIPTION_LENGTH + 1))]}, "tools[0].function.description"),
        (
            {"tools": [tool(str(i), parameters={"title": "x" * (MAX_SCHEMA_BYTES - 16)}) for i in range(17)]},
            "tools",
        ),
        ({"tools": [tool()], "tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tools": [tool()], "tool_choice": {"type": "hosted"}}, "tool_choice.type"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [tool()], "tool_choice": allowed("some", "f")}, "tool_choice.allowed_tools.mode"),
        ({"tools": [tool()], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tools": [tool()], "tool_choice": allowed("auto", "g")}, "tool_choice.allowed_tools.tools[0].function.name"),
        ({"tool_choice": allowed("required", "f")}, "tool_choice"),
        (
            {"tools": [tool()], "tool_choice": NAMED | allowed("auto", "f") | {"type": "function"}},
            "tool_choice.allowed_tools",
        ),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_wrong_field_is_refused_by_its_path(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields) == param


def test_fields_at_their_bounds_are_taken() -> None:
    assert len(plan(tools=[tool(str(index)) for index in range(MAX_TOOLS)]).tools) == MAX_TOOLS
    assert plan(tools=[tool("x" * 64, parameters=nested(MAX_SCHEMA_DEPTH), description="x" * MAX_DESCRIPTION_LENGTH)])
    largest = {"title": "x" * (MAX_SCHEMA_BYTES - len('{"title":""}'))}
    assert plan(tools=[tool(str(i), parameters=largest) for i in range(MAX_TOOLS_BYTES // MAX_SCHEMA_BYTES)])


def message(**fields: Any) -> ChatMessage:
    return msgspec.convert(fields, ChatMessage)


def call(**more: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}} | more


def test_calls_and_their_results_are_taken() -> None:
    check_tool_messages(
        [
            message(role="user", content="hi"),
            message(role="assistant", tool_calls=[call()] * MAX_CALLS_PER_MESSAGE),
            message(role="tool", tool_call_id="call_1", content="42"),
        ]
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"role": "user", "content": "a", "tool_calls": [call()]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [call()] * (MAX_CALLS_PER_MESSAGE + 1)}, "messages[0].tool_calls"),
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": []}, "messages[0].content"),
        ({"role": "tool", "content": "42"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "tool_calls": [call(id="")]}, "messages[0].tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": [call(), 7]}, "messages[0].tool_calls[1]"),
        ({"role": "assistant", "tool_calls": [call(type="x")]}, "messages[0].tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [call(function={"name": 7})]}, "messages[0].tool_calls[0].function.name"),
        (
            {"role": "assistant", "tool_calls": [call(function={"name": "f", "arguments": "{"})]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_messages_that_call_wrongly_are_refused_by_path(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as fault:
        check_tool_messages([message(**fields)])
    assert fault.value.param == param
