"""What differs between the endpoints that generate: how a request is read and how an answer is written."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from onward.api.answer import Usage
from onward.api.openai import Bounds, GenerationRequest

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Head:
    """What every part of an answer repeats."""

    id: str
    created_s: int
    model: str
    fingerprint: str

    def fields(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(frozen=True, slots=True)
class Said:
    """One choice of a finished answer."""

    index: int
    text: str
    finish_reason: str | None


class Dialect(Protocol):
    id_prefix: str
    prompt_param: str
    chunk_object: str

    def decode(self, body: bytes, bounds: Bounds) -> tuple[GenerationRequest, int]: ...
    def prompt_token_ids(self, request: Any, created_s: int) -> list[int]: ...
    def opening(self) -> bytes | None:
        """What a choice's stream begins with: the JSON that stands for its text, if there is any."""
        ...

    def said(self, text: str, finish_reason: str | None) -> bytes:
        """The JSON that stands for some text in a chunk's choice."""
        ...

    def whole(self, head: Head, choices: list[Said], usage: Usage) -> bytes: ...


class Chunks:
    """The JSON of a stream's chunks. Called for every token: the parts that do not change are made once."""

    def __init__(self, dialect: Dialect, head: Head, include_usage: bool) -> None:
        fields = _encode(head.fields(dialect.chunk_object))
        self._before = fields[:-1] + b',"choices":['
        self._choice_before = self._before + b'{"index":'
        self._after = b'],"usage":null}' if include_usage else b"]}"
        self._choice_after = b"}" + self._after
        self._said: Callable[[str, str | None], bytes] = dialect.said
        self._opening = dialect.opening()

    def opening(self, choice: int) -> bytes | None:
        return None if self._opening is None else self._chunk(choice, self._opening, None)

    def piece(self, choice: int, text: str, finish_reason: str | None) -> bytes:
        return self._chunk(choice, self._said(text, finish_reason), finish_reason)

    def usage(self, usage: Usage) -> bytes:
        return self._before + b'],"usage":' + _encode(usage.as_json()) + b"}"

    def _chunk(self, choice: int, said: bytes, finish_reason: str | None) -> bytes:
        end = b"null" if finish_reason is None else b'"%b"' % finish_reason.encode()
        return b'%b%d,%b,"logprobs":null,"finish_reason":%b%b' % (
            self._choice_before,
            choice,
            said,
            end,
            self._choice_after,
        )
