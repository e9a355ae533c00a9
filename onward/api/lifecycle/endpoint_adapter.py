"""What differs between the endpoints that generate: how a request is read (`EndpointAdapter`), and how the answer to one is
written (`OutputJsonWriter`)."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from onward.api.lifecycle.choice_update import ChoiceUpdate, OutputTextStream
from onward.api.lifecycle.request_output import TokenUsage
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.schemas import GenerationRequest, ValidationContext
from onward.proto.reasoning_params import ReasoningParams
from onward.proto.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ObjectHeader:
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
class OpeningChunk:
    """What a choice's stream begins with, before there is a token."""

    content_json: bytes
    """The JSON that stands for its content."""
    extra_choice_fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of the choice."""
    extra_top_level_fields: dict[str, Any] = field(default_factory=dict)
    """Fields that stand beside the choice."""


class OutputJsonWriter(ABC):
    """Writes the answer to one request. A function of the request and the piece: nothing of earlier pieces is kept, so
    that whoever goes on with an answer writes the same."""

    chunk_object = ""
    has_extra_choice_fields = False
    """Whether `extra_choice_fields` returns something for updates that are nothing but tokens."""

    def opening_chunk(self, choice: int) -> OpeningChunk | None:
        return None

    def content_json(self, update: ChoiceUpdate) -> bytes:
        """The JSON that stands for a piece's content in a chunk's choice."""
        raise AssertionError(f"{type(self).__name__} writes no chunks")

    def client_finish_reason(self, update: ChoiceUpdate) -> str | None:
        """Why the choice has ended, if it has, as clients know it."""
        return update.finish_reason

    def logprobs(self, update: ChoiceUpdate) -> Any:
        """Those of a piece that has them."""
        return None

    def extra_choice_fields(self, update: ChoiceUpdate) -> dict[str, Any]:
        """Further fields of a piece's choice."""
        return {}

    def extra_top_level_fields(self, update: ChoiceUpdate) -> dict[str, Any]:
        """Fields that stand beside a piece's choice."""
        return {}

    @abstractmethod
    def whole_body(
        self, header: ObjectHeader, choices: list[ChoiceUpdate], usage: TokenUsage, extra_fields: dict[str, Any]
    ) -> bytes:
        """Of each choice, all that there is to say. `extra_fields`: fields beside the choices."""


class EndpointAdapter(ABC):
    id_prefix: str
    returns_text = True
    """Whether clients read text. Else they read token ids."""

    @abstractmethod
    def decode(self, body: bytes, context: ValidationContext) -> tuple[GenerationRequest, tuple[str, ...]]:
        """The request, and the names of its unknown fields."""

    @abstractmethod
    def tokenize_prompts(self, request: Any, created_s: int) -> list[list[int]]:
        """The token ids of each."""

    @abstractmethod
    def prompt_path(self, request: Any, index: int) -> str:
        """Where in the request a prompt stands."""

    def reasoning_params(self, request: Any, prompts: list[list[int]], *, has_grammar: bool) -> ReasoningParams | None:
        """How a worker follows the thinking, where it must."""
        return None

    def client_field_names(self) -> AbstractContextManager[None]:
        """Within it, complaints name the fields of the client's request, where those that are checked have other names."""
        return nullcontext()

    @abstractmethod
    def new_text_stream(self, prepared: PreparedRequest, sampling: SamplingParams) -> OutputTextStream: ...
    @abstractmethod
    def json_writer(self, prepared: PreparedRequest) -> OutputJsonWriter: ...
