"""What differs between the endpoints that generate: how a request is read (`Dialect`), and how the answer to one is written
(`Writer`)."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from onward.api.answer import Usage
from onward.api.pieces import Piece, Text
from onward.api.prepared import Prepared
from onward.api.requests import Bounds, GenerationRequest
from onward.proto.sampling import Sampling
from onward.proto.thinking import ThinkingRule


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
class Opening:
    """What a choice's stream begins with, before there is a token."""

    said: bytes
    """The JSON that stands for its content."""
    inside: dict[str, Any] = field(default_factory=dict)
    """Further fields of the choice."""
    beside: dict[str, Any] = field(default_factory=dict)
    """Fields that stand beside the choice."""


class Writer(Protocol):
    """Writes the answer to one request. A function of the request and the piece: nothing of earlier pieces is kept, so
    that whoever goes on with an answer writes the same."""

    chunk_object: str
    adds_to_every_piece: bool
    """Whether `inside` has something to say of pieces that are nothing but tokens."""

    def opening(self, choice: int) -> Opening | None: ...
    def said(self, piece: Piece) -> bytes:
        """The JSON that stands for a piece's content in a chunk's choice."""
        ...

    def told_reason(self, piece: Piece) -> str | None:
        """Why the choice has ended, if it has, as clients know it."""
        ...

    def logprobs(self, piece: Piece) -> Any:
        """Those of a piece that has them."""
        ...

    def inside(self, piece: Piece) -> dict[str, Any]:
        """Further fields of a piece's choice."""
        ...

    def beside(self, piece: Piece) -> dict[str, Any]:
        """Fields that stand beside a piece's choice."""
        ...

    def whole(self, head: Head, choices: list[Piece], usage: Usage, beside: dict[str, Any]) -> bytes:
        """Of each choice, all that there is to say. `beside`: fields that stand beside the choices."""
        ...


class Dialect(Protocol):
    id_prefix: str
    shows_text: bool
    """Whether clients read text. Else they read token ids."""

    def decode(self, body: bytes, bounds: Bounds) -> tuple[GenerationRequest, tuple[str, ...]]:
        """The request, and the names of its unknown fields."""
        ...

    def prompts(self, request: Any, created_s: int) -> list[list[int]]:
        """The token ids of each."""
        ...

    def prompt_path(self, request: Any, index: int) -> str:
        """Where in the request a prompt stands."""
        ...

    def thinking(self, request: Any, prompts: list[list[int]], *, has_grammar: bool) -> ThinkingRule | None:
        """How a worker follows the thinking, where it must."""
        ...

    def new_text(self, prepared: Prepared, sampling: Sampling) -> Text: ...
    def writer(self, prepared: Prepared) -> Writer: ...
