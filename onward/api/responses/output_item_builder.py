"""What the tokens of an answer say, as the typed events of a response: steps in, events out.

A function of the steps, one for each token and one for the end, so whoever replays the tokens of a stream knows which
events its reader has had. Space between items belongs to none of them: it is held until words follow it. Knows nothing of
numbers, sockets or the response around the output.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

from onward.api.lifecycle import logprobs_json
from onward.api.lifecycle.logprobs_json import TokenStrings
from onward.proto.step import TokenLogprobs
from onward.text.message_events import (
    ContentText,
    EndEvents,
    MarkupText,
    MessageEvent,
    ReasoningText,
    TokenEvents,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
)
from onward.text.tool_calls.call_ids import IdStyle, tool_call_id

ItemStatus = Literal["in_progress", "completed", "incomplete"]


@dataclass(slots=True)
class OutputItem(ABC):
    """Words, thoughts or a call, while it grows and when it is done. The id is a function of the request and of the item's
    place."""

    id: str
    index: int
    status: ItemStatus = "in_progress"
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @abstractmethod
    def as_json(self) -> dict[str, Any]: ...


class TextItem(OutputItem):
    __slots__ = ()
    delta = done = ""
    """The events that tell of its text."""

    @abstractmethod
    def part(self) -> dict[str, Any]: ...


@dataclass(slots=True)
class MessageItem(TextItem):
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    has_logprobs: bool = False

    delta, done = "response.output_text.delta", "response.output_text.done"

    def part(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"type": "output_text", "text": self.text, "annotations": []}
        return fields | {"logprobs": list(self.logprobs)} if self.has_logprobs else fields

    def as_json(self) -> dict[str, Any]:
        """Empty as long as there is nothing in it."""
        has_part = bool(self.texts) or self.status != "in_progress"
        content = [self.part()] if has_part else []
        return {"type": "message", "id": self.id, "status": self.status, "role": "assistant", "content": content}


class ReasoningItem(TextItem):
    __slots__ = ()
    delta, done = "response.reasoning_text.delta", "response.reasoning_text.done"

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def as_json(self) -> dict[str, Any]:
        content = [self.part()] if self.texts else []
        return {"type": "reasoning", "id": self.id, "status": self.status, "summary": [], "content": content}


@dataclass(slots=True, kw_only=True)
class FunctionCallItem(OutputItem):
    """Its text is the JSON of its arguments."""

    call_id: str
    name: str

    def as_json(self) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": self.id,
            "status": self.status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.text,
        }


EventFields = tuple[str, dict[str, Any]]
"""An event's type, and its other fields."""


class OutputItemBuilder:
    """`token_strings`: where logprobs are asked for."""

    def __init__(self, request_id: str, id_style: IdStyle, token_strings: TokenStrings | None) -> None:
        self.items: list[OutputItem] = []
        self.num_reasoning_tokens = 0
        self._request_id = request_id
        self._id_style: IdStyle = id_style
        self._token_strings = token_strings
        self._open: OutputItem | None = None
        self._calls: dict[int, FunctionCallItem] = {}
        self._held_whitespace = ""
        self._held_kind: type[TextItem] = MessageItem
        """Space that no item has begun with."""
        self._pending_logprobs: list[dict[str, Any]] = []
        """Of tokens whose text has not been told yet."""

    def output(self) -> list[dict[str, Any]]:
        return [item.as_json() for item in self.items]

    def token(self, step: TokenEvents, token_id: int, logprobs: TokenLogprobs | None) -> list[EventFields]:
        if self._token_strings is not None and logprobs is not None:
            self._pending_logprobs += logprobs_json.chat_logprobs(self._token_strings, [token_id], [logprobs])[
                "content"
            ]
        events = [fields for event in step.events for fields in self._apply_event(event)]
        if step.events and not isinstance(step.events[-1], ContentText):
            self._pending_logprobs = []  # it was a thought, or a part of a call, or a mark around them
        if self._is_thinking(step):
            self.num_reasoning_tokens += 1
        return events

    def end(self, step: EndEvents, reason: str) -> list[EventFields]:
        """How an output has ended that was not cut."""
        events = [fields for event in step.events for fields in self._apply_event(event)]
        if not self.items:
            events += self._open_item(self._new_text(self._held_kind))
            events += self._delta(self._held_whitespace) if self._held_whitespace else []
        return events + self._close_item("incomplete" if reason == "length" else "completed")

    def mark_incomplete(self) -> None:
        """It will not go on."""
        if self._open is not None:
            self._open.status = "incomplete"

    def _is_thinking(self, step: TokenEvents) -> bool:
        if any(isinstance(event, ReasoningText) for event in step.events):
            return True
        return not step.events and (isinstance(self._open, ReasoningItem) or self._held_kind is ReasoningItem)

    def _apply_event(self, event: MessageEvent) -> list[EventFields]:
        match event:
            case ContentText(text):
                return self._add_text(text, MessageItem)
            case ReasoningText(text):
                del self._pending_logprobs[:-1]
                return self._add_text(text, ReasoningItem)
            case ToolCallStarted(index, name):
                return self._start_call(index, name)
            case ToolCallArguments(index, delta):
                return self._add_arguments(self._calls[index], delta)
            case ToolCallEnded(index, is_complete):
                return self._end_call(self._calls[index], is_complete)
            case MarkupText():
                del self._pending_logprobs[:-1]
        return []

    def _add_text(self, text: str, kind: type[TextItem]) -> list[EventFields]:
        if isinstance(self._open, kind):
            return self._delta(text)
        events = self._close_item("completed")
        self._held_whitespace = self._held_whitespace + text if self._held_kind is kind else text
        self._held_kind = kind
        if not self._held_whitespace.strip():
            return events
        return events + self._open_item(self._new_text(kind)) + self._delta(self._held_whitespace)

    def _new_text(self, kind: type[TextItem]) -> TextItem:
        index = len(self.items)
        if kind is ReasoningItem:
            return ReasoningItem(f"rs_{self._request_id}_{index}", index)
        return MessageItem(f"msg_{self._request_id}_{index}", index, has_logprobs=self._token_strings is not None)

    def _open_item(self, item: OutputItem) -> list[EventFields]:
        self.items.append(item)
        self._open = item
        events: list[EventFields] = [
            ("response.output_item.added", {"output_index": item.index, "item": item.as_json()})
        ]
        if isinstance(item, TextItem):
            events.append(("response.content_part.added", self._content_position(item) | {"part": item.part()}))
        return events

    def _delta(self, text: str) -> list[EventFields]:
        """Of the text that is open."""
        item = self._open
        assert isinstance(item, TextItem), "a text is open"
        self._held_whitespace, self._held_kind = "", MessageItem
        item.texts.append(text)
        fields = self._content_position(item) | {"delta": text}
        if isinstance(item, MessageItem):
            item.logprobs += self._pending_logprobs
            fields["logprobs"] = _brief(self._pending_logprobs)
            self._pending_logprobs = []
        return [(item.delta, fields)]

    def _start_call(self, index: int, name: str) -> list[EventFields]:
        events = self._close_item("completed")
        del self._pending_logprobs[:-1]
        self._held_whitespace, self._held_kind = "", MessageItem
        output_index = len(self.items)
        call_id = tool_call_id(self._request_id, 0, index, self._id_style)
        call = self._calls[index] = FunctionCallItem(
            f"fc_{self._request_id}_{output_index}", output_index, call_id=call_id, name=name
        )
        return events + self._open_item(call)

    def _add_arguments(self, call: FunctionCallItem, delta: str) -> list[EventFields]:
        if not delta:
            return []
        call.texts.append(delta)
        return [("response.function_call_arguments.delta", _of_item(call) | {"delta": delta})]

    def _end_call(self, call: FunctionCallItem, is_complete: bool) -> list[EventFields]:
        del self._pending_logprobs[:-1]
        return self._close_item("completed" if is_complete else "incomplete") if self._open is call else []

    def _close_item(self, status: ItemStatus) -> list[EventFields]:
        item, self._open = self._open, None
        if item is None:
            return []
        item.status = status
        events: list[EventFields]
        if not isinstance(item, TextItem):
            events = [("response.function_call_arguments.done", _of_item(item) | {"arguments": item.text})]
        else:
            done = self._content_position(item) | {"text": item.text}
            if isinstance(item, MessageItem):
                done["logprobs"] = _brief(item.logprobs)
            events = [
                (item.done, done),
                ("response.content_part.done", self._content_position(item) | {"part": item.part()}),
            ]
        return [*events, ("response.output_item.done", {"output_index": item.index, "item": item.as_json()})]

    def _content_position(self, item: TextItem) -> dict[str, Any]:
        return _of_item(item) | {"content_index": 0}


def _of_item(item: OutputItem) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.index}


def _brief(logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As events have them: without bytes."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [{"token": top["token"], "logprob": top["logprob"]} for top in entry["top_logprobs"]],
        }
        for entry in logprobs
    ]
