"""Converts the messages of Ollama's API to the messages of a chat, one to one.

Ollama's calls and results need no ids, and templates do. A call without one gets a number, and a result belongs to the
first call of its name that has no result yet. An error names the path in the client's request.
"""

from collections import defaultdict, deque
from itertools import product
from typing import Any

import msgspec

from onward.web.json_body import field_error
from onward.web.ollama_api.ollama_requests import OllamaMessage, OllamaToolCall

_ID_DIGITS = 9
"""Templates of Mistral require ids of nine letters or digits; all others accept them."""


def to_chat(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    calls = _OpenCalls()
    return [_message(message, f"messages[{index}]", calls) for index, message in enumerate(messages)]


def continues_last_message(messages: list[OllamaMessage]) -> bool:
    """Returns whether the conversation ends with text of the assistant. The answer then continues it."""
    last = messages[-1]
    return last.role == "assistant" and bool(last.content) and not last.tool_calls


class _OpenCalls:
    """The calls that have no result yet, in the order of the conversation."""

    def __init__(self) -> None:
        self._num_numbered = 0
        self._calls: list[tuple[str, str]] = []
        """Id and name of each call, with or without a result."""
        self._answered: set[int] = set()
        """Indices of the calls that have a result."""
        self._waiting: defaultdict[tuple[str | None, str | None], deque[int]] = defaultdict(deque)
        """Indices of calls by what a result says of its call: id, name, both or neither. So a result costs no
        search, however many calls there are. A call with a result leaves its other queues when it gets to their front."""

    def add(self, call: OllamaToolCall) -> str:
        call_id, name = call.id or self._next_id(), call.function.name
        for key in product((None, call_id), (None, name)):
            self._waiting[key].append(len(self._calls))
        self._calls.append((call_id, name))
        return call_id

    def take(self, call_id: str | None, name: str | None) -> tuple[str, str | None]:
        """Returns the id and the name of the call that a result belongs to."""
        queue = self._waiting.get((call_id, name))
        while queue:
            index = queue.popleft()
            if index not in self._answered:
                self._answered.add(index)
                return self._calls[index]
        return call_id or self._next_id(), name

    def _next_id(self) -> str:
        self._num_numbered += 1
        return f"{self._num_numbered:0{_ID_DIGITS}}"


def _message(message: OllamaMessage, path: str, calls: _OpenCalls) -> dict[str, Any]:
    if message.images:
        raise field_error(f"{path}.images", "this server reads text only: images are not supported")
    chat: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        chat["reasoning_content"] = message.thinking
    if message.tool_calls:
        chat["content"] = message.content or None
        chat["tool_calls"] = [
            _call(call, f"{path}.tool_calls[{index}]", calls) for index, call in enumerate(message.tool_calls)
        ]
    if message.role == "tool":
        chat["tool_call_id"], name = calls.take(message.tool_call_id or None, message.tool_name or None)
        chat |= {} if name is None else {"name": name}
    return chat


def _call(call: OllamaToolCall, path: str, calls: _OpenCalls) -> dict[str, Any]:
    try:
        arguments = msgspec.json.encode(call.function.arguments).decode()
    except (RecursionError, UnicodeEncodeError) as fault:
        raise field_error(f"{path}.function.arguments", "cannot be written as JSON") from fault
    return {"id": calls.add(call), "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
