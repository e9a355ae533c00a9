"""The router's side of the protocol, as small as it can be: one attempt, and what its events say."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from onward.proto import SCHEMA_VERSION
from onward.proto.cursor import Cursor, parse_cursor
from onward.proto.router import ATTEMPT_PATH, FIND_PATH, Attempt, ChoiceSnapshot, FindStream, PromptUsage, StreamRecord
from tests.api.reader import NO_CERTIFICATES, AnswerRead, ChoiceRead, take

REQUEST_ID = "0123456789abcdef0123456789abcdef"
_epochs = itertools.count(1)
"""Each attempt here is later than all before, as those of a router are."""

MSGPACK_BODY = {"content-type": "application/msgpack"}


@dataclass
class Heard:
    """What an attempt's answer has said."""

    cursors: list[Cursor] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    openings: list[int] = field(default_factory=list)
    """Choices in the order of their openings."""
    facts: list[PromptUsage] = field(default_factory=list)
    answer: bytes | None = None
    error: dict[str, Any] | None = None
    comments: list[str] = field(default_factory=list)
    num_bare: int = 0
    """Events for the router alone."""
    order: list[str] = field(default_factory=list)
    is_done: bool = False

    def tokens(self, num_choices: int) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in range(num_choices)]
        for cursor in self.cursors:
            for index, token_ids in cursor.new_tokens.items():
                tokens[index] += token_ids
        return tokens

    def read(self, num_choices: int) -> AnswerRead:
        """As the client reads the chunks."""
        answer = AnswerRead([ChoiceRead() for _ in range(num_choices)])
        for chunk in self.chunks:
            take(answer, chunk)
        return answer


def attempt_of(path: str, request: dict[str, Any], **fields: Any) -> Attempt:
    fixed: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "path": path,
        "body": msgspec.json.encode(request),
        "request_id": REQUEST_ID,
        "attempt_epoch": next(_epochs),
        "seed": 7,
        "created_s": 1_600_000_000,
    }
    return Attempt(**(fixed | fields))


def given(*choices: tuple[list[int], str | None]) -> list[ChoiceSnapshot]:
    return [ChoiceSnapshot(list(token_ids), reason) for token_ids, reason in choices]


def post(url: str, attempt: Attempt, **headers: str) -> httpx.Response:
    message = msgspec.msgpack.encode(attempt)
    headers = MSGPACK_BODY | headers
    return httpx.post(url + ATTEMPT_PATH, content=message, headers=headers, timeout=30, verify=NO_CERTIFICATES)


def hear(url: str, attempt: Attempt) -> Heard:
    response = post(url, attempt)
    assert response.status_code == 200, response.text
    heard = heard_in(response.text)
    assert heard.is_done
    return heard


def heard_in(text: str) -> Heard:
    heard = Heard()
    *events, rest = text.split("\n\n")
    assert rest == "", "whole events only"
    for event in events:
        assert not heard.is_done, "nothing comes behind the end"
        _hear(heard, event)
    return heard


def error_in(response: httpx.Response) -> dict[str, Any]:
    """What an attempt has failed with: by the status if its stream had not begun, else by its last event."""
    if response.status_code != 200:
        return response.json()["error"]
    heard = heard_in(response.text)
    assert heard.error is not None and heard.answer is None
    assert heard.order[-2:] == ["error", "plain"], "after the tokens so far, and before the end"
    return heard.error


def find(url: str, request_id: str) -> StreamRecord | None:
    message = msgspec.msgpack.encode(FindStream(request_id))
    response = httpx.post(
        url + FIND_PATH,
        content=message,
        headers=MSGPACK_BODY,
        timeout=30,
        verify=NO_CERTIFICATES,
    )
    if response.status_code == 404:
        assert response.json()["error"]["code"] == "stream_unknown"
        return None
    assert response.status_code == 200, response.text
    return msgspec.msgpack.decode(response.content, type=StreamRecord)


def _hear(heard: Heard, event: str) -> None:
    if event.startswith(":"):
        heard.comments.append(event)
        return
    lines = dict(line.split(":", 1) for line in event.split("\n"))
    data, name = lines["data"].strip(), lines.get("event", "").strip()
    if "id" in lines:
        heard.cursors.append(parse_cursor(lines["id"].strip()))
        heard.num_bare += not data
    heard.order.append(name or ("id" if "id" in lines else "plain"))
    match name:
        case "facts":
            heard.facts.append(msgspec.json.decode(data, type=PromptUsage))
        case "answer":
            heard.answer = data.encode()
        case "error":
            heard.error = msgspec.json.decode(data)["error"]
        case _ if data == "[DONE]":
            heard.is_done = True
        case _ if data:
            _hear_chunk(heard, msgspec.json.decode(data))


def _hear_chunk(heard: Heard, chunk: dict[str, Any]) -> None:
    heard.chunks.append(chunk)
    heard.openings += [one["index"] for one in chunk["choices"] if one.get("delta", {}).get("role")]
