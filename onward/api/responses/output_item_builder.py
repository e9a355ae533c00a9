"""Turns the parsed text of an output into items that open, grow and close, and their events.

The events are a function of the steps (one for each token, and one for the end), so a replay of a stream's tokens finds
the events that its reader has had. White space between items belongs to none of them: it is held until text follows it.
An `ItemEventWriter` writes the events, whose form differs between APIs. Knows nothing of event numbers, sockets or the
response around the output.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol

from onward.api.lifecycle import logprobs_json
from onward.api.lifecycle.logprobs_json import TokenStrings
from onward.proto.step import TokenLogprobs
from onward.text.message_events import (
    ContentText,
    CustomToolInput,
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
EventFields = tuple[str, dict[str, Any]]
"""An event's type, and its other fields."""
NO_NAMESPACES: Mapping[str, tuple[str, str]] = MappingProxyType({})


@dataclass(slots=True)
class OutputItem:
    """A message, reasoning or a call, while it grows and when it has ended. Its id depends only on the request and the
    item's index."""

    id: str
    index: int
    status: ItemStatus = "in_progress"
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class TextItem(OutputItem):
    __slots__ = ()


@dataclass(slots=True)
class MessageItem(TextItem):
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class ReasoningItem(TextItem):
    __slots__ = ()


@dataclass(slots=True, kw_only=True)
class FunctionCallItem(OutputItem):
    """A tool call. `text` is the JSON of its arguments."""

    call_id: str
    name: str
    namespace: str | None = None


class CustomToolCallItem(FunctionCallItem):
    """A call of a custom tool. `text` is its input."""

    __slots__ = ()


class ItemEventWriter(Protocol):
    """Writes an API's events about one item. Each method is called after the item has changed, so it may read the item."""

    def opened(self, item: OutputItem) -> list[EventFields]: ...
    def grown(self, item: OutputItem, text: str, logprobs: list[dict[str, Any]]) -> list[EventFields]:
        """Returns the events for `text` that was added to the item, with the text's logprobs if it is a message that
        has them."""
        ...

    def closed(self, item: OutputItem) -> list[EventFields]: ...


class OutputItemBuilder:
    """Builds the output items of one choice. `token_strings` is set if logprobs are requested."""

    def __init__(
        self,
        request_id: str,
        id_style: IdStyle,
        token_strings: TokenStrings | None,
        writer: ItemEventWriter,
        *,
        holds_leading_space: bool = True,
        namespaced_names: Mapping[str, tuple[str, str]] = NO_NAMESPACES,
    ) -> None:
        """`holds_leading_space`: white space before the first item is held too. `namespaced_names`: the namespace and the
        name of each tool in a namespace, by its name in the prompt."""
        self.items: list[OutputItem] = []
        self.num_reasoning_tokens = 0
        self._request_id = request_id
        self._id_style: IdStyle = id_style
        self._token_strings = token_strings
        self._writer = writer
        self._holds_leading_space = holds_leading_space
        self._namespaced_names = namespaced_names
        self._open: OutputItem | None = None
        self._calls: dict[int, FunctionCallItem] = {}
        self._held_whitespace = ""
        self._held_kind: type[TextItem] = MessageItem
        """The kind of text that `_held_whitespace` belongs to. No item has begun with it."""
        self._pending_logprobs: list[dict[str, Any]] = []
        """Logprobs of tokens whose text has not been returned yet."""

    def token(self, step: TokenEvents, token_id: int, logprobs: TokenLogprobs | None) -> list[EventFields]:
        if self._token_strings is not None and logprobs is not None:
            self._pending_logprobs += logprobs_json.chat_logprobs(self._token_strings, [token_id], [logprobs])[
                "content"
            ]
        events = [fields for event in step.events for fields in self._apply_event(event)]
        if step.events and not isinstance(step.events[-1], ContentText):
            self._pending_logprobs = []  # the token was reasoning, a part of a call, or a marker around them
        if self._is_thinking(step):
            self.num_reasoning_tokens += 1
        return events

    def end(self, step: EndEvents, reason: str) -> list[EventFields]:
        """Ends an output that is complete, and returns the last events."""
        events = [fields for event in step.events for fields in self._apply_event(event)]
        if not self.items:
            events += self._open_item(self._new_text(self._held_kind))
            events += self._delta(self._held_whitespace) if self._held_whitespace else []
        return events + self._close_item("incomplete" if reason == "length" else "completed")

    def cut(self) -> list[EventFields]:
        """Ends an output that was cut: held white space is dropped, and the open item stays incomplete."""
        return self._close_item("incomplete")

    def mark_incomplete(self) -> None:
        """Marks the open item as incomplete, without an event, because the output will not continue."""
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
            case ToolCallStarted(index, name, is_custom=is_custom):
                return self._start_call(index, name, is_custom=is_custom)
            case ToolCallArguments(index, delta) | CustomToolInput(index, delta):
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
        is_held = bool(self.items) or self._holds_leading_space
        if is_held and not self._held_whitespace.strip():
            return events
        return events + self._open_item(self._new_text(kind)) + self._delta(self._held_whitespace)

    def _new_text(self, kind: type[TextItem]) -> TextItem:
        index = len(self.items)
        if kind is ReasoningItem:
            return ReasoningItem(f"rs_{self._request_id}_{index}", index)
        return MessageItem(f"msg_{self._request_id}_{index}", index)

    def _open_item(self, item: OutputItem) -> list[EventFields]:
        self.items.append(item)
        self._open = item
        return self._writer.opened(item)

    def _delta(self, text: str) -> list[EventFields]:
        """Adds text to the open item, and returns the events."""
        item = self._open
        assert isinstance(item, TextItem), "a text is open"
        self._held_whitespace, self._held_kind = "", MessageItem
        item.texts.append(text)
        logprobs: list[dict[str, Any]] = []
        if isinstance(item, MessageItem):
            logprobs, self._pending_logprobs = self._pending_logprobs, []
            item.logprobs += logprobs
        return self._writer.grown(item, text, logprobs)

    def _start_call(self, index: int, name: str, *, is_custom: bool) -> list[EventFields]:
        events = self._close_item("completed")
        del self._pending_logprobs[:-1]
        self._held_whitespace, self._held_kind = "", MessageItem
        output_index = len(self.items)
        call_id = tool_call_id(self._request_id, 0, index, self._id_style)
        namespace, short_name = self._namespaced_names.get(name, (None, name))
        kind, prefix = (CustomToolCallItem, "ctc") if is_custom else (FunctionCallItem, "fc")
        call = self._calls[index] = kind(
            f"{prefix}_{self._request_id}_{output_index}",
            output_index,
            call_id=call_id,
            name=short_name,
            namespace=namespace,
        )
        return events + self._open_item(call)

    def _add_arguments(self, call: FunctionCallItem, delta: str) -> list[EventFields]:
        if not delta:
            return []
        call.texts.append(delta)
        return self._writer.grown(call, delta, [])

    def _end_call(self, call: FunctionCallItem, is_complete: bool) -> list[EventFields]:
        del self._pending_logprobs[:-1]
        return self._close_item("completed" if is_complete else "incomplete") if self._open is call else []

    def _close_item(self, status: ItemStatus) -> list[EventFields]:
        item, self._open = self._open, None
        if item is None:
            return []
        item.status = status
        return self._writer.closed(item)
