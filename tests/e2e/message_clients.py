"""Clients of `/v1/messages`: typed events instead of chunks, resumed by `Last-Event-ID` like any other stream."""

import json
from typing import Any

import msgspec

from onward.proto.cursor import parse_cursor
from tests.e2e.answers import (
    GREEDY,
    KEEP_LIST,
    LONG_LIST,
    MODEL,
    Hearing,
    Question,
    message_answer,
    seeded,
)
from tests.e2e.streams import TOPICS

PATH = "/v1/messages"


class MessageHearing(Hearing):
    """One client's message, over all its connections."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []
        self._num_at_place = self._num_tokens = 0

    def hear(self, lines: list[str]) -> None:
        fields = dict(line.split(": ", 1) for line in lines if not line.startswith(":"))
        if not fields:
            return
        event = msgspec.json.decode(fields["data"])
        assert event["type"] == fields["event"]
        assert not self.done, f"something comes behind the end: {event}"
        self.note()
        if event["type"] == "error":
            self.error, self.done = event["error"], True
            return
        self.events.append(event)
        if place := fields.get("id"):
            self._advance(place)
            self._num_at_place = len(self.events)
        self.done = event["type"] == "message_stop"

    def _advance(self, place: str) -> None:
        """Tokens without an event of their own are counted by the next place, and not listed."""
        cursor = parse_cursor(place)
        [told] = cursor.choices
        num_new = len(cursor.new_tokens.get(0, ()))
        assert told.position - num_new >= self._num_tokens, f"{place} counts a token twice"
        self._num_tokens, self.place = told.position, place

    def lose_connection(self) -> None:
        """Events behind the last place come again."""
        self.is_open = self.done = False
        self.error = None
        del self.events[self._num_at_place :]

    def answer(self) -> dict[str, Any]:
        assert self.error is None, f"an error instead of an end: {self.error}"
        return message_answer(built(self.events))


def built(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that these events build. Each event comes once and in its place."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"], "a message begins once"
    message: dict[str, Any] = {**events[0]["message"], "content": []}
    texts: list[str] = []
    is_open = False
    for event in events[2:]:
        kind = event["type"]
        if kind.startswith("content_block"):
            assert event["index"] == len(texts) - (kind != "content_block_start"), f"a block out of place: {event}"
            assert is_open == (kind != "content_block_start"), f"a block is open or closed: {event}"
        if kind == "content_block_start":
            message["content"].append(dict(event["content_block"]))
            texts.append("")
            is_open = True
        elif kind == "content_block_delta":
            [text] = (value for name, value in event["delta"].items() if name not in ("type", "signature"))
            texts[-1] += text
        elif kind == "content_block_stop":
            is_open = False
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    for block, text in zip(message["content"], texts, strict=True):
        if block["type"] == "tool_use":
            block |= _arguments(text)
        else:
            block["text"] = text
    return message


def _arguments(text: str) -> dict[str, Any]:
    try:
        return {"input": json.loads(text)}
    except ValueError:
        return {"input": {}, "partial_json": text}


def message(name: str, number: int, max_tokens: int, **more: Any) -> Question:
    text = f"{number}. Explain what {TOPICS[number % len(TOPICS)]} have to do with the weather, in two sentences."
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True}
    return Question(name, PATH, body | more)


def message_questions(max_tokens: int) -> list[Question]:
    tool = {"name": "keep_list", "input_schema": KEEP_LIST["function"]["parameters"]}
    call: dict[str, Any] = {"tools": [tool], "tool_choice": {"type": "any"}}
    schema = {"output_config": {"format": {"type": "json_schema", "schema": LONG_LIST}}}
    streamed = {"stream": True}
    return [
        message("messages, streamed", 30, max_tokens, **GREEDY, **streamed),
        message("messages, stop sequences", 31, max_tokens, stop_sequences=[" weather", "."], **seeded(30)),
        message("messages, streamed, a call", 32, max_tokens, **call, **seeded(31), **streamed),
        message("messages, streamed, schema", 33, max_tokens, **schema, **seeded(32), **streamed),
        message("messages, a call", 34, max_tokens, **call, **seeded(33)),
    ]
