"""The request fields that constrain the output, and the one grammar that they result in.

OpenAI's `response_format`, vLLM's `guided_…` and `structured_outputs`, SGLang's `regex`, `ebnf` and `json_schema`, and
llama.cpp's `grammar` and `json_schema`. Whether a grammar can be compiled is not checked here.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from onward.proto.sampling_params import MAX_GRAMMAR_BYTES, Grammar
from onward.text.tool_calls.custom_input import INPUT
from onward.web.json_body import field_error
from onward.web.openai_api.shared_fields import SharedFields
from onward.web.openai_api.tools import CustomGrammar, ResolvedTools, Tool

MAX_GUIDED_CHOICES = 4096
MAX_NAME_LENGTH = 64
RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_FORMAT_FIELDS: dict[str, tuple[str, ...]] = {"text": (), "json_object": ("schema",), "json_schema": ("json_schema",)}
"""The fields beside `type` by type. The fields of a structural tag are checked with its grammar."""


class StructuredOutputFields(SharedFields, frozen=True, kw_only=True):
    """The fields that constrain the output, and the fields that all generating requests share. `/v1/responses` and
    `/v1/messages` have other fields for a grammar."""

    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    """Empty: no grammar, which is llama.cpp's default."""
    structured_outputs: dict[str, Any] | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    """Accepted without effect: this server has one backend."""


@dataclass(frozen=True, slots=True)
class RequestedGrammar:
    """A grammar, and the field that asks for it."""

    grammar: Grammar
    field_path: str


def requested_grammar(fields: StructuredOutputFields) -> RequestedGrammar | None:
    """Returns the grammar that the fields ask for, if any. Raises `InvalidRequest` for an invalid field, and if more than
    one field asks for a grammar."""
    if fields.guided_whitespace_pattern is not None:
        raise _no_whitespace("guided_whitespace_pattern")
    found = [
        *_from_response_format(fields.response_format),
        *_from_guided_fields(fields),
        *_from_structured_outputs(fields.structured_outputs),
    ]
    if len(found) > 1:
        raise field_error(
            found[1].field_path, f"an answer can have one structure, and {found[0].field_path} asks for one already"
        )
    return found[0] if found else None


def _from_response_format(response_format: dict[str, Any] | None) -> list[RequestedGrammar]:
    if response_format is None:
        return []
    kind = response_format.get("type")
    if kind in _FORMAT_FIELDS:
        for name in sorted(response_format.keys() - {"type", *_FORMAT_FIELDS[kind]}):
            if response_format[name] is not None:
                raise field_error(f"response_format.{name[:MAX_NAME_LENGTH]}", f"is not a field of the type {kind}")
    if kind == "text":
        return []
    if kind == "json_object":
        if response_format.get("schema") is not None:
            return [_schema(response_format["schema"], "response_format.schema")]
        return [RequestedGrammar(Grammar("json_object"), "response_format")]
    if kind == "json_schema":
        return [_from_json_schema(response_format.get("json_schema"), "response_format.json_schema")]
    if kind == "structural_tag":
        tags = {name: value for name, value in response_format.items() if name != "type"}
        return [_structural_tag(tags, "response_format")]
    raise field_error("response_format.type", f"must be one of {', '.join(RESPONSE_FORMATS)}")


def _from_json_schema(json_schema: Any, path: str) -> RequestedGrammar:
    if not isinstance(json_schema, dict):
        raise field_error(path, "is required: an object with name and schema")
    name = json_schema.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_LENGTH:
        raise field_error(f"{path}.name", f"is required: a string of 1 to {MAX_NAME_LENGTH} characters")
    if not isinstance(json_schema.get("strict"), bool | None):
        raise field_error(f"{path}.strict", "must be true or false")
    # `strict` makes no difference: the output always follows the schema.
    if json_schema.get("schema") is None:
        raise field_error(f"{path}.schema", "is required: a JSON schema")
    return _schema(json_schema["schema"], f"{path}.schema")


def _from_guided_fields(fields: StructuredOutputFields) -> list[RequestedGrammar]:
    return _read_fields(
        {
            "guided_json": (_schema, fields.guided_json),
            "guided_regex": (_regex, fields.guided_regex),
            "guided_choice": (_choice, fields.guided_choice),
            "guided_grammar": (_grammar, fields.guided_grammar),
            "json_schema": (_schema, fields.json_schema),
            "regex": (_regex, fields.regex),
            "ebnf": (_grammar, fields.ebnf),
            "grammar": (_grammar, fields.grammar or None),
        }
    )


def _from_structured_outputs(fields: dict[str, Any] | None) -> list[RequestedGrammar]:
    """Reads `structured_outputs`, in which newer versions of vLLM group these fields."""
    if fields is None:
        return []
    path = "structured_outputs"
    readers = {
        "json": _schema,
        "regex": _regex,
        "choice": _choice,
        "grammar": _grammar,
        "json_object": _json_object,
        "structural_tag": _structural_tag,
    }
    if fields.get("whitespace_pattern") is not None:
        raise _no_whitespace(f"{path}.whitespace_pattern")
    for name, value in fields.items():
        if name not in readers and value not in (None, False):
            raise field_error(f"{path}.{name}", f"is not known; there are {', '.join(readers)}")
    return _read_fields({f"{path}.{name}": (reader, fields.get(name)) for name, reader in readers.items()})


def _read_fields(readers: dict[str, tuple[Callable[[Any, str], RequestedGrammar], Any]]) -> list[RequestedGrammar]:
    present = {path: (reader, value) for path, (reader, value) in readers.items() if value is not None}
    return [
        reader(value, path) for path, (reader, value) in present.items() if (reader, value) != (_json_object, False)
    ]


def _schema(value: Any, path: str) -> RequestedGrammar:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise field_error(path, f"is not JSON: {error}") from error
    if not isinstance(value, dict | bool):
        raise field_error(path, "must be a JSON schema: an object, true or false")
    return _checked_size(Grammar("json_schema", _json(value, path)), path)


def _regex(value: Any, path: str) -> RequestedGrammar:
    return _checked_size(Grammar("regex", _text(value, path)), path)


def _grammar(value: Any, path: str) -> RequestedGrammar:
    return _checked_size(Grammar("grammar", _text(value, path)), path)


def _choice(value: Any, path: str) -> RequestedGrammar:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_GUIDED_CHOICES:
        raise field_error(path, f"must be a list of 1 to {MAX_GUIDED_CHOICES} strings")
    for index, choice in enumerate(value):
        if not isinstance(choice, str) or not choice:
            raise field_error(f"{path}[{index}]", "must be a string that is not empty")
    return _checked_size(Grammar("choice", _json(value, path)), path)


def _json_object(value: Any, path: str) -> RequestedGrammar:
    if value is not True:
        raise field_error(path, "must be true or false")
    return RequestedGrammar(Grammar("json_object"), path)


def _structural_tag(value: Any, path: str) -> RequestedGrammar:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise field_error(path, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise field_error(path, "must be an object with structures and triggers")
    return _checked_size(Grammar("structural_tag", _json(value, path)), path)


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str) or not value:
        raise field_error(path, "must be a string that is not empty")
    return value


def _json(value: Any, path: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (RecursionError, UnicodeEncodeError) as error:
        raise field_error(path, "cannot be written as JSON") from error


def _checked_size(grammar: Grammar, path: str) -> RequestedGrammar:
    try:
        size = len(grammar.source.encode())
    except UnicodeEncodeError as error:
        raise field_error(path, "holds half a surrogate pair, which is not Unicode text") from error
    if size > MAX_GRAMMAR_BYTES:
        raise field_error(path, f"has {size} bytes, and at most {MAX_GRAMMAR_BYTES} are allowed")
    return RequestedGrammar(grammar, path)


def _no_whitespace(path: str) -> Exception:
    return field_error(path, 'is not supported; a schema can say {"x-guidance": {"whitespace_flexible": true}}')


ANYTHING: dict[str, Any] = {"type": "object"}
"""Schema of the arguments of a tool without `parameters`."""

_DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are data and not schemas, so a `$ref` in them is not a reference."""
_MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def tool_call_grammar(plan: ResolvedTools) -> Grammar | None:
    """Returns the grammar of an output that must call tools. None if the request does not force a call.

    The grammar is a JSON Schema of a list of calls: `[{"name": "get_weather", "parameters": {"city": "Paris"}}]`. Each
    tool's own schema is placed in `$defs`, and its references to its own parts are adjusted to the new place. The text
    of such an output is parsed by the `json` format. If only one custom tool with a grammar may be called, the output is
    its input."""
    if not plan.is_forced:
        return None
    if plan.raw_tool is not None and plan.raw_tool.custom is not None and plan.raw_tool.custom.grammar is not None:
        return _raw_input_grammar(plan.raw_tool.custom.grammar)
    tools = plan.callable_tools
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call(index, tool) for index, tool in enumerate(tools)]},
        "$defs": {
            _definition_name(index): _with_moved_refs(_tool_schema(tool), index) for index, tool in enumerate(tools)
        },
    }
    if plan.max_calls is not None:
        schema["maxItems"] = plan.max_calls
    source = json.dumps(schema, ensure_ascii=False)
    if len(source.encode()) > MAX_GRAMMAR_BYTES:
        choice = plan.tool_choice if plan.tool_choice == "required" else "a function"
        raise field_error(plan.field, f"with tool_choice {choice}, at most {MAX_GRAMMAR_BYTES} bytes of schemas in all")
    return Grammar("json_schema", source)


def output_grammar(request: StructuredOutputFields, tools: ResolvedTools) -> RequestedGrammar | None:
    """Returns the grammar of the output: the one that the request asks for, or the one of forced tool calls. None: no
    grammar."""
    requested, call_grammar = requested_grammar(request), tool_call_grammar(tools)
    if requested is not None and tools.tool_choice != "none":
        raise field_error(
            requested.field_path, "not allowed with tools that may be called; tool_choice none forbids calls"
        )
    return requested if call_grammar is None else RequestedGrammar(call_grammar, tools.field)


def _call(index: int, tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.definition.name},
            "parameters": {"$ref": f"#/$defs/{_definition_name(index)}"},
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _tool_schema(tool: Tool) -> dict[str, Any]:
    """Returns the schema of a tool's arguments. They are an object, whether or not the tool's schema says so."""
    schema = ANYTHING | (tool.definition.parameters or {})
    grammar = None if tool.custom is None else tool.custom.grammar
    if grammar is None:
        return schema
    if grammar.syntax == "lark":
        problem = f"{tool.definition.name}: a tool with a Lark grammar can only be forced alone; name it in tool_choice"
        raise field_error("tools", problem)
    # A pattern may match anywhere in a string, but the input must match as a whole.
    return schema | {"properties": {INPUT: {"type": "string", "pattern": f"^(?:{grammar.definition})$"}}}


def _raw_input_grammar(grammar: CustomGrammar) -> Grammar:
    """Returns the grammar of an output that is the input of a custom tool."""
    return Grammar("grammar" if grammar.syntax == "lark" else "regex", grammar.definition)


def _definition_name(index: int) -> str:
    return f"tool_{index}"


def _with_moved_refs(schema: Any, index: int) -> Any:
    """Returns the schema with references into itself adjusted to its place in `$defs`."""
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
        # The keys of this map are names and never keywords.
        return {name: _with_moved_refs(inner, index) for name, inner in value.items()}
    return _with_moved_refs(value, index)
