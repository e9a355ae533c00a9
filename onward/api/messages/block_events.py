"""The content blocks of a message in Anthropic's format: their JSON, and the stream events about one block."""

import hashlib
from base64 import b64encode
from typing import Any

import msgspec

from onward.api.responses.output_item_builder import (
    EventFields,
    FunctionCallItem,
    MessageItem,
    OutputItem,
    ReasoningItem,
)

SIGNATURE_BYTES = 24
PARTIAL_JSON = "partial_json"
"""Extra field of a `tool_use` block whose arguments are not a JSON object: their text. `input` is empty then."""


def signature(thinking: str) -> str:
    """Returns a checksum of the thinking. Clients return it together with the block; it is not checked."""
    return b64encode(hashlib.blake2b(thinking.encode(), digest_size=SIGNATURE_BYTES).digest()).decode()


class MessageBlockEvents:
    """An `ItemEventWriter` that writes the events of Anthropic's content blocks."""

    def __init__(self, *, shows_thinking: bool) -> None:
        """`shows_thinking`: thinking blocks have their text. Otherwise it is empty, and only its signature is sent."""
        self._shows_thinking = shows_thinking

    def block(self, item: OutputItem) -> dict[str, Any]:
        """Returns the complete block."""
        match item:
            case MessageItem():
                return _text(item.text)
            case ReasoningItem():
                thinking = item.text if self._shows_thinking else ""
                return {"type": "thinking", "thinking": thinking, "signature": signature(item.text)}
            case FunctionCallItem():
                return _tool_use(item) | _arguments(item.text)
            case _:
                raise AssertionError(f"an item of the kind {type(item).__name__}")

    def opened(self, item: OutputItem) -> list[EventFields]:
        match item:
            case MessageItem():
                block: dict[str, Any] = _text("")
            case ReasoningItem():
                block = {"type": "thinking", "thinking": "", "signature": ""}
            case FunctionCallItem():
                block = _tool_use(item) | {"input": {}}
            case _:
                raise AssertionError(f"an item of the kind {type(item).__name__}")
        return [("content_block_start", {"index": item.index, "content_block": block})]

    def grown(self, item: OutputItem, text: str, logprobs: list[dict[str, Any]]) -> list[EventFields]:
        match item:
            case MessageItem():
                delta = {"type": "text_delta", "text": text}
            case ReasoningItem():
                if not self._shows_thinking:
                    return []
                delta = {"type": "thinking_delta", "thinking": text}
            case _:
                delta = {"type": "input_json_delta", "partial_json": text}
        return [_delta(item, delta)]

    def closed(self, item: OutputItem) -> list[EventFields]:
        stop: EventFields = ("content_block_stop", {"index": item.index})
        if not isinstance(item, ReasoningItem):
            return [stop]
        return [_delta(item, {"type": "signature_delta", "signature": signature(item.text)}), stop]


def _delta(item: OutputItem, delta: dict[str, Any]) -> EventFields:
    return "content_block_delta", {"index": item.index, "delta": delta}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def _tool_use(item: FunctionCallItem) -> dict[str, Any]:
    return {"type": "tool_use", "id": item.call_id, "name": item.name, "caller": {"type": "direct"}}


def _arguments(text: str) -> dict[str, Any]:
    """Returns `input`, and for arguments that were cut or are not a JSON object also their text."""
    if not text:
        return {"input": {}}
    try:
        return {"input": msgspec.json.decode(text, type=dict[str, Any])}
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return {"input": {}, PARTIAL_JSON: text}
