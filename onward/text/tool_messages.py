"""Tools and calls of earlier messages as chat templates want them.

Clients send a call's arguments as JSON text. Most templates write them with `tojson` and need the object; a few join them
to other text as they are. A template that has never heard of tools gets them told in words, in a system message, with
the plainest way to call them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from onward.errors import InvalidRequest

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
    """The messages with a system message that tells of the tools: the first one where there is one, else a new one."""
    tools_prompt = TOOLS_SYSTEM_PROMPT + "\n".join(
        json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools
    )
    first = messages[0] if messages else {}
    if first.get("role") not in ("system", "developer"):
        return [{"role": "system", "content": tools_prompt}, *messages]
    content = first.get("content")
    parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content or []]
    return [{**first, "content": "\n\n".join([*parts, tools_prompt])}, *messages[1:]]


def with_template_arguments(messages: Sequence[Message], *, as_text: bool) -> list[Message]:
    """The messages with the arguments of their calls as the template wants them. Raises what names the field."""
    return [_for_template(message, f"messages[{index}]", as_text) for index, message in enumerate(messages)]


def _for_template(message: Message, path: str, as_text: bool) -> Message:
    calls = message.get("tool_calls")
    if not calls:  # templates test for the field by its presence, so an empty list goes too
        return {name: value for name, value in message.items() if name != "tool_calls"}
    plain = [_call(call, f"{path}.tool_calls[{index}]", as_text) for index, call in enumerate(calls)]
    return {**message, "tool_calls": plain}


def _call(call: Mapping[str, Any], path: str, as_text: bool) -> Mapping[str, Any]:
    function = call["function"]
    arguments = parse_arguments(function.get("arguments"), f"{path}.function.arguments")
    formatted = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    return {**call, "function": {**function, "arguments": formatted}}


def parse_arguments(value: Any, path: str) -> dict[str, Any]:
    """A call's arguments as an object, from the JSON text that a client has sent back."""
    if value is None or value == "":
        return {}
    try:
        decoded = msgspec.json.decode(value) if isinstance(value, str) else value
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as fault:
        raise InvalidRequest(f"{path}: must be the JSON text of an object ({fault})", param=path) from fault
    if not isinstance(decoded, dict):
        raise InvalidRequest(f"{path}: must be the JSON text of an object", param=path)
    return decoded
