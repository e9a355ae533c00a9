"""What the tokens of an answer say, as the typed events of a response: steps in, events out.

A function of the steps, one for each token and one for the end, so whoever replays the tokens of a stream knows which
events its reader has had. Space between items belongs to none of them: it is held until words follow it. Knows nothing of
numbers, sockets or the response around the output.
"""

from typing import Any

from onward.api import logprobs
from onward.api.logprobs import TokenNames
from onward.api.responses.output import CallItem, MessageItem, OutputItem, ReasoningItem, Status, TextItem
from onward.proto.step import TokenLogprobs
from onward.text.message_events import (
    Arguments,
    CallEnded,
    CallStarted,
    Content,
    EndTold,
    Event,
    Markup,
    Reasoning,
    TokenTold,
)
from onward.text.tool_calls.ids import IdStyle, tool_call_id

Told = tuple[str, dict[str, Any]]
"""An event's type, and its other fields."""


class Story:
    """`names`: where logprobs are asked for."""

    def __init__(self, request_id: str, id_style: IdStyle, names: TokenNames | None) -> None:
        self.items: list[OutputItem] = []
        self.num_reasoning_tokens = 0
        self._request_id = request_id
        self._id_style: IdStyle = id_style
        self._names = names
        self._open: OutputItem | None = None
        self._calls: dict[int, CallItem] = {}
        self._held = ""
        self._held_kind: type[TextItem] = MessageItem
        """Space that no item has begun with."""
        self._scores: list[dict[str, Any]] = []
        """Of tokens whose text has not been told yet."""

    def output(self) -> list[dict[str, Any]]:
        return [item.as_json() for item in self.items]

    def token(self, step: TokenTold, token_id: int, score: TokenLogprobs | None) -> list[Told]:
        if self._names is not None and score is not None:
            self._scores += logprobs.of_chat(self._names, [token_id], [score])["content"]
        told = [one for event in step.events for one in self._tell(event)]
        if step.events and not isinstance(step.events[-1], Content):
            self._scores = []  # it was a thought, or a part of a call, or a mark around them
        if self._is_thinking(step):
            self.num_reasoning_tokens += 1
        return told

    def end(self, step: EndTold, reason: str) -> list[Told]:
        """How an output has ended that was not cut."""
        told = [one for event in step.events for one in self._tell(event)]
        if not self.items:
            told += self._opened(self._new_text(self._held_kind))
            told += self._delta(self._held) if self._held else []
        return told + self._closed("incomplete" if reason == "length" else "completed")

    def cut(self) -> None:
        """It will not go on."""
        if self._open is not None:
            self._open.status = "incomplete"

    def _is_thinking(self, step: TokenTold) -> bool:
        if any(isinstance(event, Reasoning) for event in step.events):
            return True
        return not step.events and (isinstance(self._open, ReasoningItem) or self._held_kind is ReasoningItem)

    def _tell(self, event: Event) -> list[Told]:
        match event:
            case Content(text):
                return self._say(text, MessageItem)
            case Reasoning(text):
                del self._scores[:-1]
                return self._say(text, ReasoningItem)
            case CallStarted(index, name):
                return self._start_call(index, name)
            case Arguments(index, delta):
                return self._argue(self._calls[index], delta)
            case CallEnded(index, is_complete):
                return self._end_call(self._calls[index], is_complete)
            case Markup():
                del self._scores[:-1]
        return []

    def _say(self, text: str, kind: type[TextItem]) -> list[Told]:
        if isinstance(self._open, kind):
            return self._delta(text)
        told = self._closed("completed")
        self._held = self._held + text if self._held_kind is kind else text
        self._held_kind = kind
        if not self._held.strip():
            return told
        return told + self._opened(self._new_text(kind)) + self._delta(self._held)

    def _new_text(self, kind: type[TextItem]) -> TextItem:
        index = len(self.items)
        if kind is ReasoningItem:
            return ReasoningItem(f"rs_{self._request_id}_{index}", index)
        return MessageItem(f"msg_{self._request_id}_{index}", index, is_scored=self._names is not None)

    def _opened(self, item: OutputItem) -> list[Told]:
        self.items.append(item)
        self._open = item
        told: list[Told] = [("response.output_item.added", {"output_index": item.index, "item": item.as_json()})]
        if not isinstance(item, CallItem):
            told.append(("response.content_part.added", self._place(item) | {"part": item.part()}))
        return told

    def _delta(self, text: str) -> list[Told]:
        """Of the text that is open."""
        item = self._open
        assert item is not None and not isinstance(item, CallItem)
        self._held, self._held_kind = "", MessageItem
        item.texts.append(text)
        fields = self._place(item) | {"delta": text}
        if isinstance(item, MessageItem):
            item.logprobs += self._scores
            fields["logprobs"] = _brief(self._scores)
            self._scores = []
        return [(item.delta, fields)]

    def _start_call(self, index: int, name: str) -> list[Told]:
        told = self._closed("completed")
        del self._scores[:-1]
        self._held, self._held_kind = "", MessageItem
        place = len(self.items)
        call_id = tool_call_id(self._request_id, 0, index, self._id_style)
        call = self._calls[index] = CallItem(f"fc_{self._request_id}_{place}", place, call_id, name)
        return told + self._opened(call)

    def _argue(self, call: CallItem, delta: str) -> list[Told]:
        if not delta:
            return []
        call.texts.append(delta)
        return [("response.function_call_arguments.delta", _of_item(call) | {"delta": delta})]

    def _end_call(self, call: CallItem, is_complete: bool) -> list[Told]:
        del self._scores[:-1]
        return self._closed("completed" if is_complete else "incomplete") if self._open is call else []

    def _closed(self, status: Status) -> list[Told]:
        item, self._open = self._open, None
        if item is None:
            return []
        item.status = status
        told: list[Told]
        if isinstance(item, CallItem):
            told = [("response.function_call_arguments.done", _of_item(item) | {"arguments": item.text})]
        else:
            done = self._place(item) | {"text": item.text}
            if isinstance(item, MessageItem):
                done["logprobs"] = _brief(item.logprobs)
            told = [(item.done, done), ("response.content_part.done", self._place(item) | {"part": item.part()})]
        return [*told, ("response.output_item.done", {"output_index": item.index, "item": item.as_json()})]

    def _place(self, item: TextItem) -> dict[str, Any]:
        return _of_item(item) | {"content_index": 0}


def _of_item(item: OutputItem) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.index}


def _brief(scores: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As events have them: without bytes."""
    return [
        {
            "token": one["token"],
            "logprob": one["logprob"],
            "top_logprobs": [{"token": top["token"], "logprob": top["logprob"]} for top in one["top_logprobs"]],
        }
        for one in scores
    ]
