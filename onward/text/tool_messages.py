"""Converts tools and earlier tool calls to the form that chat templates expect.

Clients send a call's arguments as JSON text. Most templates write them with `tojson` and need the object; a few insert
them as text. For a template without support for tools, a system message describes the tools and the plainest call
format.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from onward.errors import InvalidRequest
from onward.text.tool_calls.custom_input import INPUT

Tool = Mapping[str, Any]
Message = Mapping[str, Any]

# `… + call['function']['arguments'] + …`, without a filter behind it.
_JOINED_AS_TEXT = re.compile(r"""[+~]\s*[\w.\[\]'"]*\barguments['"]?\]?\s*(?:[+~]|-?}})""")
_READS_TOOLS = re.compile(r"\btools\b")

TOOLS_SYSTEM_PROMPT = """\
You can call tools. To call some, answer with nothing but a JSON list of calls:
[{"name": "the tool's name", "arguments": {"its": "arguments"}}]
If no tool is needed, answer in words. The tools, with JSON Schemas of their arguments:
"""


def template_reads_tools(template: str) -> bool:
    return _READS_TOOLS.search(template) is not None


def template_joins_arguments(template: str) -> bool:
    return _JOINED_AS_TEXT.search(template) is not None


def with_tools_system_message(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Returns the messages with the tools in a system message: in the first one if there is one, else in a new one."""
    tools_prompt = TOOLS_SYSTEM_PROMPT + "\n".join(
        json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools
    )
    first = messages[0] if messages else {}
    if first.get("role") not in ("system", "developer"):
        return [{"role": "system", "content": tools_prompt}, *messages]
    content = first.get("content")
    parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content or []]
    return [{**first, "content": "\n\n".join([*parts, tools_prompt])}, *messages[1:]]


def with_tool_calls(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with `function_call` and the role `function`, which are older forms, as calls and results of
    tools. Templates know only those."""
    ids: dict[str, str] = {}
    return [_with_tool_calls(message, index, ids) for index, message in enumerate(messages)]


def _with_tool_calls(message: Message, index: int, ids: dict[str, str]) -> Message:
    """Returns the message with `function_call` as a tool call, or with the role `function` as a tool's result. `ids`
    has the id of the latest call of each function; a call is added to it. Some templates require ids of nine
    letters and digits."""
    call_id = f"call{index % 100_000:05}"
    call = message.get("function_call")
    if isinstance(call, Mapping):
        ids[str(call.get("name"))] = call_id
        others = {name: value for name, value in message.items() if name != "function_call"}
        return {**others, "tool_calls": [{"id": call_id, "type": "function", "function": call}]}
    if message.get("role") == "function":
        return {**message, "role": "tool", "tool_call_id": ids.get(str(message.get("name")), call_id)}
    return message


def with_template_arguments(messages: Sequence[Message], *, as_text: bool) -> list[Message]:
    """Returns the messages with the arguments of their calls as the template wants them: as JSON text with `as_text`,
    else as objects. Raises `InvalidRequest` with the field's path if arguments are not a JSON object."""
    return [_for_template(message, f"messages[{index}]", as_text) for index, message in enumerate(messages)]


def _for_template(message: Message, path: str, as_text: bool) -> Message:
    calls = message.get("tool_calls")
    if not calls:  # templates test for the field by its presence, so an empty list goes too
        return {name: value for name, value in message.items() if name != "tool_calls"}
    plain = [_call(call, f"{path}.tool_calls[{index}]", as_text) for index, call in enumerate(calls)]
    return {**message, "tool_calls": plain}


def _call(call: Mapping[str, Any], path: str, as_text: bool) -> Mapping[str, Any]:
    if call.get("type") == "custom":
        custom = call["custom"]
        arguments: Mapping[str, Any] = {INPUT: custom["input"]}
        formatted = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
        return {"id": call["id"], "type": "function", "function": {"name": custom["name"], "arguments": formatted}}
    function = call["function"]
    arguments = parse_arguments(function.get("arguments"), f"{path}.function.arguments")
    formatted = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    return {**call, "function": {**function, "arguments": formatted}}


def parse_arguments(value: Any, path: str) -> dict[str, Any]:
    """Returns a call's arguments as an object. A client may send JSON text, an object, or nothing. Raises
    `InvalidRequest` with `path` for anything else."""
    if value is None or value == "":
        return {}
    try:
        decoded = msgspec.json.decode(value) if isinstance(value, str) else value
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as fault:
        raise InvalidRequest(f"{path}: must be the JSON text of an object ({fault})", param=path) from fault
    if not isinstance(decoded, dict):
        raise InvalidRequest(f"{path}: must be the JSON text of an object", param=path)
    return decoded
