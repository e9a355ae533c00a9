"""What the routes answer, as structs for `/openapi.json`. A test holds real answers against them.

The answers themselves are written field by field, since a token's chunk must cost little; see `lifecycle.chunk_encoder`.
"""

from typing import Any

import msgspec

from onward.web.error_format import ErrorFields


class ErrorResponse(msgspec.Struct, frozen=True):
    error: ErrorFields
    partial: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """What there is of the answer, where a request failed that has tokens."""


class UsageFields(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatMessageFields(msgspec.Struct, frozen=True):
    role: str
    content: str | None
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    """What the model thought, where it thinks."""
    tool_calls: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class ChatChoiceFields(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessageFields
    logprobs: dict[str, Any] | None
    finish_reason: str
    """`stop`, `length`, `tool_calls` or `abort`."""


class ChatCompletionResponse(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoiceFields]
    usage: UsageFields


class CompletionChoiceFields(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str


class CompletionResponse(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoiceFields]
    usage: UsageFields


class EmbeddingFields(msgspec.Struct, frozen=True):
    object: str
    index: int
    embedding: list[float] | str
    """Numbers, or base64 of float32 where the request asks for it."""


class EmbeddingsResponse(msgspec.Struct, frozen=True):
    object: str
    data: list[EmbeddingFields]
    model: str


class TokenizeResponse(msgspec.Struct, frozen=True):
    tokens: list[int]
    count: int


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str


class AbortResponse(msgspec.Struct, frozen=True):
    aborted: list[str]
    unknown: list[str]
    """Names of no request that runs or is kept, or of another caller's."""


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    """The longest prompt plus output, in tokens."""


class ModelList(msgspec.Struct, frozen=True):
    object: str
    data: list[ModelCard]


class StatusResponse(msgspec.Struct, frozen=True):
    status: str


class VersionResponse(msgspec.Struct, frozen=True):
    version: str


RESPONSES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatCompletionResponse,
    "/v1/completions": CompletionResponse,
    "/v1/embeddings": EmbeddingsResponse,
    "/v1/abort": AbortResponse,
    "/tokenize": TokenizeResponse,
    "/detokenize": DetokenizeResponse,
    "/v1/models": ModelList,
    "/v1/models/{model}": ModelCard,
    "/health": StatusResponse,
    "/live": StatusResponse,
    "/drain": StatusResponse,
    "/undrain": StatusResponse,
    "/version": VersionResponse,
}
"""By path, where the answer has a fixed form. Of streamed answers: the body without `stream`."""
