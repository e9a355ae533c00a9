"""The differences between generating endpoints: how a request is read (`EndpointAdapter`), and how its output is written
(`OutputJsonWriter`)."""

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
    """The fields that every chunk of a response repeats."""

    id: str
    created_s: int
    model: str
    fingerprint: str
    completed_s: int | None = None
    """When the output was complete, once it is."""

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
    """The first chunk of a choice's stream, before its first token."""

    content_json: bytes
    """The JSON field with the content."""
    extra_choice_fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of the choice."""
    extra_top_level_fields: dict[str, Any] = field(default_factory=dict)
    """Fields beside the choice."""


class OutputJsonWriter(ABC):
    """Writes the output of one request as the endpoint's JSON. The JSON depends only on the request and the update. No
    state of earlier updates is kept, so a later attempt writes the same."""

    chunk_object = ""
    has_extra_choice_fields = False
    """Whether `extra_choice_fields` returns fields for every update, also for one with tokens alone."""

    def opening_chunk(self, choice: int) -> OpeningChunk | None:
        return None

    def content_json(self, update: ChoiceUpdate) -> bytes:
        """Returns the JSON field with the content of an update, for the choice of a chunk."""
        raise AssertionError(f"{type(self).__name__} writes no chunks")

    def client_finish_reason(self, update: ChoiceUpdate) -> str | None:
        """Returns the finish reason in the endpoint's terms, or None."""
        return update.finish_reason

    def logprobs(self, update: ChoiceUpdate) -> Any:
        """Returns the JSON value of an update's logprobs. Called only if it has some."""
        return None

    def extra_choice_fields(self, update: ChoiceUpdate) -> dict[str, Any]:
        """Returns further fields of the update's choice."""
        return {}

    def extra_top_level_fields(self, update: ChoiceUpdate) -> dict[str, Any]:
        """Returns fields beside the update's choice."""
        return {}

    @abstractmethod
    def whole_body(
        self, header: ObjectHeader, choices: list[ChoiceUpdate], usage: TokenUsage, extra_fields: dict[str, Any]
    ) -> bytes:
        """Returns the body of a complete response. `choices` has one joined update for each choice. `extra_fields`: fields
        beside the choices."""


class EndpointAdapter(ABC):
    id_prefix: str
    returns_text = True
    """Whether clients read text. False: they read token ids."""

    @abstractmethod
    def decode(self, body: bytes, context: ValidationContext) -> tuple[GenerationRequest, tuple[str, ...]]:
        """Returns the decoded request and the names of its unknown fields."""

    @abstractmethod
    def tokenize_prompts(self, request: Any, created_s: int) -> list[list[int]]:
        """Returns the token ids of each prompt."""

    @abstractmethod
    def prompt_path(self, request: Any, index: int) -> str:
        """Returns the path of the field with this prompt, for errors."""

    def reasoning_params(self, request: Any, prompts: list[list[int]], *, has_grammar: bool) -> ReasoningParams | None:
        """Returns the parameters by which the worker tracks reasoning. None if it need not."""
        return None

    def client_field_names(self) -> AbstractContextManager[None]:
        """Returns a context in which errors name the fields of the client's request, if the checked fields have other
        names."""
        return nullcontext()

    @abstractmethod
    def new_text_stream(self, prepared: PreparedRequest, sampling: SamplingParams) -> OutputTextStream: ...
    @abstractmethod
    def json_writer(self, prepared: PreparedRequest) -> OutputJsonWriter: ...
