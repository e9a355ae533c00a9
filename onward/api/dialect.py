"""What differs between the endpoints that generate: how a request is read and how an answer is written."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from onward.api import continuing
from onward.api.answer import Piece, Text, Usage
from onward.api.openai import Bounds, GenerationRequest
from onward.proto.sampling import Sampling

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


class Dialect(Protocol):
    id_prefix: str
    prompt_param: str
    chunk_object: str
    prompt_logprobs_place: Literal["answer", "choice"]
    """Whether they stand beside the choices or in one."""

    def decode(self, body: bytes, bounds: Bounds) -> tuple[GenerationRequest, int]: ...
    def prompt_token_ids(self, request: Any, created_s: int) -> list[int]: ...
    def new_text(self, stop: list[str], sampling: Sampling) -> Text: ...
    def opening(self) -> bytes | None:
        """What a choice's stream begins with: the JSON that stands for its content, if there is any."""
        ...

    def said(self, piece: Piece) -> bytes:
        """The JSON that stands for a piece's content in a chunk's choice."""
        ...

    def logprobs(self, piece: Piece) -> Any:
        """Those of a piece that has them."""
        ...

    def prompt_logprobs(self, piece: Piece) -> Any: ...
    def whole(self, head: Head, choices: list[Piece], usage: Usage, beside: dict[str, Any]) -> bytes:
        """Of each choice, all that there is to say. `beside`: fields that stand beside the choices."""
        ...


class Chunks:
    """The JSON of a stream's chunks. Called for every token: the parts that do not change are made once."""

    def __init__(self, dialect: Dialect, head: Head, include_usage: bool) -> None:
        fields = _encode(head.fields(dialect.chunk_object))
        self._before = fields[:-1] + b',"choices":['
        self._choice_before = self._before + b'{"index":'
        self._end = b',"usage":null}' if include_usage else b"}"
        self._plain_end = b"}]" + self._end
        self._dialect = dialect
        self._said: Callable[[Piece], bytes] = dialect.said
        self._opening = dialect.opening()

    def opening(self, choice: int) -> bytes | None:
        return None if self._opening is None else self._chunk(choice, self._opening, b"null", None, self._plain_end)

    def piece(self, piece: Piece, beside: dict[str, Any] | None = None) -> bytes:
        """`beside`: fields that stand beside the choice."""
        logprobs = b"null" if piece.logprobs is None else _encode(self._dialect.logprobs(piece))
        plain = piece.prompt_logprobs is None and piece.finish_reason is None
        end = self._plain_end if plain else self._rich_end(piece, beside or {})
        return self._chunk(piece.choice, self._said(piece), logprobs, piece.finish_reason, end)

    def usage(self, usage: Usage) -> bytes:
        return self._before + b'],"usage":' + _encode(usage.as_json()) + b"}"

    def _rich_end(self, piece: Piece, beside: dict[str, Any]) -> bytes:
        inside = continuing.of_choice(piece)
        if piece.prompt_logprobs is not None:
            told = {"prompt_logprobs": self._dialect.prompt_logprobs(piece)}
            if self._dialect.prompt_logprobs_place == "choice":
                inside = told | inside
            else:
                beside = told | beside
        return _more_fields(inside) + b"}]" + _more_fields(beside) + self._end

    def _chunk(self, choice: int, said: bytes, logprobs: bytes, finish_reason: str | None, end: bytes) -> bytes:
        reason = b"null" if finish_reason is None else b'"%b"' % finish_reason.encode()
        return b'%b%d,%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._choice_before,
            choice,
            said,
            logprobs,
            reason,
            end,
        )


def _more_fields(fields: dict[str, Any]) -> bytes:
    return b"," + _encode(fields)[1:-1] if fields else b""
