import json
from typing import Any

import msgspec
import pytest

from onward.api.requests.structured_outputs import tool_call_grammar
from onward.errors import InvalidRequest
from onward.web.openai_api.tools import MAX_SCHEMA_BYTES, ResolvedTools, Tool, ToolChoice, resolve_tools

NAMED = {"type": "function", "function": {"name": "g"}}


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | more}


def plan(tools: list[Any], tool_choice: Any = None) -> ResolvedTools:
    return resolve_tools(msgspec.convert(tools, list[Tool]), msgspec.convert(tool_choice, ToolChoice | None), None)


def forced_schema(**fields: Any) -> dict[str, Any]:
    grammar = tool_call_grammar(plan(**fields))
    assert grammar is not None
    assert grammar.kind == "json_schema"
    return json.loads(grammar.source)


def test_schemas_that_are_too_much_for_a_grammar_are_refused_only_where_there_is_one() -> None:
    much = [tool(str(i), parameters={"title": "x" * (MAX_SCHEMA_BYTES - 16)}) for i in range(2)]
    assert tool_call_grammar(plan(tools=much)) is None
    with pytest.raises(InvalidRequest) as fault:
        tool_call_grammar(plan(tools=much, tool_choice="required"))
    assert fault.value.param == "tools"


def test_only_calls_that_must_be_made_have_a_grammar() -> None:
    assert tool_call_grammar(plan(tools=[tool()])) is None
    assert tool_call_grammar(plan(tools=[tool()], tool_choice="none")) is None
    assert tool_call_grammar(plan(tools=[tool()], tool_choice="required")) is not None


def test_the_grammar_is_a_list_of_calls_of_the_tools_that_may_be_called() -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    both = [tool("f"), tool("g", parameters=city)]
    forced = forced_schema(tools=both, tool_choice="required")
    assert [one["properties"]["name"] for one in forced["items"]["anyOf"]] == [{"const": "f"}, {"const": "g"}]
    assert (forced["minItems"], "maxItems" in forced) == (1, False)
    assert forced["$defs"] == {"tool_0": {"type": "object"}, "tool_1": city}
    named = forced_schema(tools=both, tool_choice=NAMED)
    assert named["maxItems"] == 1
    assert [one["properties"]["name"] for one in named["items"]["anyOf"]] == [{"const": "g"}]


def test_references_within_a_tools_schema_hold_in_the_grammar_and_data_is_left_alone() -> None:
    schema = {
        "properties": {
            "$ref": {"$ref": "#/$defs/node"},
            "me": {"$ref": "#"},
            "other": {"$ref": "https://example.org/#/x"},
            "fixed": {"const": {"$ref": "#/$defs/node"}},
        },
        "$defs": {"node": {"type": "string"}},
    }
    forced = forced_schema(tools=[tool(parameters=schema)], tool_choice="required")
    moved = forced["$defs"]["tool_0"]
    assert moved["properties"] == {
        "$ref": {"$ref": "#/$defs/tool_0/$defs/node"},
        "me": {"$ref": "#/$defs/tool_0"},
        "other": {"$ref": "https://example.org/#/x"},
        "fixed": {"const": {"$ref": "#/$defs/node"}},
    }
    assert moved["$defs"] == schema["$defs"]
