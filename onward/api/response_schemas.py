"""What the routes answer, as structs for `/openapi.json`. A test holds real answers against them.

The answers themselves are written field by field, since a token's chunk must cost little; see `lifecycle.chunk_encoder`.
"""

from typing import Any, Literal

import msgspec

from onward.api.responses.event_builder import ResponseStatus
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
    system_fingerprint: str
    """Of everything that decides the numerics: instances with equal ones continue each other's streams exactly."""
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
    system_fingerprint: str
    """Of everything that decides the numerics: instances with equal ones continue each other's streams exactly."""
    choices: list[CompletionChoiceFields]
    usage: UsageFields


class GenerateChoiceFields(msgspec.Struct, frozen=True):
    index: int
    token_ids: list[int]
    logprobs: list[dict[str, Any]] | None
    """One for each of `token_ids`, where the request asks for them."""
    finish_reason: str
    """`stop`, `length`, `abort` or `pd_reschedule`."""


class GenerateResponse(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    """Of everything that decides the numerics: instances with equal ones continue each other's streams exactly."""
    choices: list[GenerateChoiceFields]
    usage: UsageFields
    prompt_logprobs: list[Any] | msgspec.UnsetType = msgspec.UNSET
    """Of the prompt's tokens, where the request asks for them."""


class OutputItemFields(msgspec.Struct, frozen=True):
    """Words (`message`), thoughts (`reasoning`) or a call (`function_call`)."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: str | msgspec.UnsetType = msgspec.UNSET
    """Of a message: `assistant`."""
    content: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    """Of a message, and of thoughts: parts with a `type` and a `text`."""
    summary: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    """Of thoughts: always empty."""
    call_id: str | msgspec.UnsetType = msgspec.UNSET
    """Of a call: what the item with its result names."""
    name: str | msgspec.UnsetType = msgspec.UNSET
    """Of a call: the function."""
    arguments: str | msgspec.UnsetType = msgspec.UNSET
    """Of a call, as JSON."""


class ResponseUsageFields(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseErrorFields(msgspec.Struct, frozen=True):
    code: str
    """`server_error`, `rate_limit_exceeded` or `invalid_prompt`, as OpenAI has them."""
    message: str
    type: str
    """The code of the error as other endpoints name it."""
    param: str | None


class ResponseObject(msgspec.Struct, frozen=True):
    id: str
    object: str
    created_at: int
    status: ResponseStatus
    background: bool
    error: ResponseErrorFields | None
    incomplete_details: dict[str, str] | None
    """Why a response is not whole: `{"reason": "max_output_tokens"}`."""
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItemFields]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsageFields | None
    """None until the response has ended."""
    user: str | None
    metadata: dict[str, str]


class DeletedResponse(msgspec.Struct, frozen=True):
    id: str
    object: str
    deleted: bool


class InputItemsPage(msgspec.Struct, frozen=True):
    object: str
    data: list[dict[str, Any]]
    """The latest first, unless `order` is `asc`."""
    first_id: str
    last_id: str
    has_more: bool
    """`after=last_id` asks for the next page."""


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
    "/v1/generate": GenerateResponse,
    "/v1/responses": ResponseObject,
    "/v1/responses/{response_id}": ResponseObject,
    "/v1/responses/{response_id}/cancel": ResponseObject,
    "/v1/responses/{response_id}/input_items": InputItemsPage,
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

RESPONSES_BY_METHOD: dict[tuple[str, str], type[msgspec.Struct]] = {
    ("DELETE", "/v1/responses/{response_id}"): DeletedResponse,
}
"""Where the methods of one path have different answers."""
