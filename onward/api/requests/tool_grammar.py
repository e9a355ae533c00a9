"""The grammar of an answer that must call tools: a JSON Schema of a list of calls.

    [{"name": "get_weather", "parameters": {"city": "Paris"}}]

Each tool's own schema stands in `$defs` as it came, and what refers to its own parts is turned to where they are now.
The text of such an answer is read by the `json` format.
"""

import json
from typing import Any

from onward.api.requests.structured_outputs import RequestedGrammar, StructuredOutputFields, requested_grammar
from onward.proto.sampling_params import MAX_GRAMMAR_BYTES, Grammar
from onward.web.json_body import field_error
from onward.web.openai_api.tools import ResolvedTools, Tool

ANYTHING: dict[str, Any] = {"type": "object"}
"""For a tool that does not say what its arguments are."""

_DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples"})
"""Their values are examples of data and no schemas: what looks like a reference in them is none."""
_MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def tool_call_grammar(plan: ResolvedTools) -> Grammar | None:
    """None if the model may say what it likes."""
    if not plan.is_forced:
        return None
    tools = plan.callable_tools
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call(index, tool) for index, tool in enumerate(tools)]},
        "$defs": {_definition_name(index): _with_moved_refs(_schema(tool), index) for index, tool in enumerate(tools)},
    }
    if plan.max_calls is not None:
        schema["maxItems"] = plan.max_calls
    source = json.dumps(schema, ensure_ascii=False)
    if len(source.encode()) > MAX_GRAMMAR_BYTES:
        choice = plan.tool_choice if plan.tool_choice == "required" else "a function"
        raise field_error("tools", f"with tool_choice {choice}, at most {MAX_GRAMMAR_BYTES} bytes of schemas in all")
    return Grammar("json_schema", source)


def output_grammar(request: StructuredOutputFields, tools: ResolvedTools) -> RequestedGrammar | None:
    """What an answer must look like, be it by the request's own words or because it must call."""
    requested, call_grammar = requested_grammar(request), tool_call_grammar(tools)
    if requested is not None and tools.tool_choice != "none":
        raise field_error(
            requested.field_path, "not allowed with tools that may be called; tool_choice none forbids calls"
        )
    return requested if call_grammar is None else RequestedGrammar(call_grammar, "tools")


def _call(index: int, tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "parameters": {"$ref": f"#/$defs/{_definition_name(index)}"},
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _schema(tool: Tool) -> dict[str, Any]:
    """A call's arguments are an object, whether or not the schema says so."""
    return ANYTHING | (tool.function.parameters or {})


def _definition_name(index: int) -> str:
    return f"tool_{index}"


def _with_moved_refs(schema: Any, index: int) -> Any:
    """The schema with references into itself that hold where it stands now."""
    if isinstance(schema, list):
        return [_with_moved_refs(item, index) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {keyword: _moved_value(keyword, value, index) for keyword, value in schema.items()}


def _moved_value(keyword: str, value: Any, index: int) -> Any:
    if keyword in _DATA_KEYWORDS:
        return value
    if keyword == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
        return f"#/$defs/{_definition_name(index)}{value[1:]}"
    if keyword in _MAPS_OF_SCHEMAS and isinstance(value, dict):
        # The names in here are not keywords, whatever they look like.
        return {name: _with_moved_refs(inner, index) for name, inner in value.items()}
    return _with_moved_refs(value, index)
