"""Response bodies of the routes, as structs for `/openapi.json`. A test validates real responses against them.

The responses themselves are written field by field, since a chunk for each token must cost little; see
`lifecycle.chunk_encoder`.
"""

from typing import Any, Literal

import msgspec

from onward.api.responses.event_builder import ResponseStatus
from onward.batches import batch_routes
from onward.batches.records import BatchList, BatchObject, DeletedFile, FileList, FileObject
from onward.web.auth.cross_site import FILES_PATH
from onward.web.error_format import ErrorFields


class ErrorResponse(msgspec.Struct, frozen=True):
    error: ErrorFields
    partial: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """The output so far, if a request failed after it had generated tokens."""


class OllamaErrorResponse(msgspec.Struct, frozen=True):
    error: str


class UsageFields(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatMessageFields(msgspec.Struct, frozen=True):
    role: str
    content: str | None
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    """The reasoning, if the model writes any."""
    tool_calls: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    function_call: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """The call of an answer to a request with `functions`."""


class ChatChoiceFields(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessageFields
    logprobs: dict[str, Any] | None
    finish_reason: str
    """`stop`, `length`, `tool_calls`, `function_call` or `abort`."""


class ChatCompletionResponse(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    """Hash of everything that decides the numerics. Instances with equal ones continue each other's streams exactly."""
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
    """Hash of everything that decides the numerics. Instances with equal ones continue each other's streams exactly."""
    choices: list[CompletionChoiceFields]
    usage: UsageFields


class GenerateChoiceFields(msgspec.Struct, frozen=True):
    index: int
    token_ids: list[int]
    logprobs: list[dict[str, Any]] | None
    """One for each of `token_ids`, if the request asks for logprobs."""
    finish_reason: str
    """`stop`, `length`, `abort` or `pd_reschedule`."""


class GenerateResponse(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    """Hash of everything that decides the numerics. Instances with equal ones continue each other's streams exactly."""
    choices: list[GenerateChoiceFields]
    usage: UsageFields
    prompt_logprobs: list[Any] | msgspec.UnsetType = msgspec.UNSET
    """Logprobs of the prompt's tokens, if the request asks for them."""


class OutputItemFields(msgspec.Struct, frozen=True):
    """An output item: text (`message`), reasoning (`reasoning`) or a call (`function_call`, `custom_tool_call`)."""

    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"] | msgspec.UnsetType = msgspec.UNSET
    """Every item but the call of a custom tool has it."""
    role: str | msgspec.UnsetType = msgspec.UNSET
    """In a message: `assistant`."""
    content: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    """In a message and in reasoning: parts with a `type` and a `text`."""
    summary: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    """In reasoning: always empty."""
    call_id: str | msgspec.UnsetType = msgspec.UNSET
    """In a call: its id, which the item with its result refers to."""
    name: str | msgspec.UnsetType = msgspec.UNSET
    """In a call: the name of the tool."""
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    """In a call of a tool that is in a namespace: the name of the namespace."""
    arguments: str | msgspec.UnsetType = msgspec.UNSET
    """In the call of a function: the arguments as JSON."""
    input: str | msgspec.UnsetType = msgspec.UNSET
    """In the call of a custom tool: its input."""


class ResponseUsageFields(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseErrorFields(msgspec.Struct, frozen=True):
    code: str
    """`server_error`, `rate_limit_exceeded` or `invalid_prompt`, as in OpenAI's API."""
    message: str
    type: str
    """The error code that other endpoints use for this error."""
    param: str | None


class ResponseObject(msgspec.Struct, frozen=True):
    id: str
    object: str
    created_at: int
    completed_at: int | None
    """Unix time at which the response was completed. None for any other status."""
    status: ResponseStatus
    background: bool
    error: ResponseErrorFields | None
    frequency_penalty: float
    incomplete_details: dict[str, str] | None
    """Why a response is incomplete: `{"reason": "max_output_tokens"}`."""
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItemFields]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    access_programs: None
    service_tier: str
    store: bool
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


class CompactedResponseObject(msgspec.Struct, frozen=True):
    id: str
    object: str
    created_at: int
    output: list[dict[str, Any]]
    """The user's messages, followed by an item of the type `compaction`."""
    usage: ResponseUsageFields


class DeletedResponse(msgspec.Struct, frozen=True):
    id: str
    object: str
    deleted: bool


class InputItemsPage(msgspec.Struct, frozen=True):
    object: str
    data: list[dict[str, Any]]
    """The input items. The latest comes first, unless `order` is `asc`."""
    first_id: str
    last_id: str
    has_more: bool
    """Whether there is another page, which `after=last_id` requests."""


class ContentBlockFields(msgspec.Struct, frozen=True):
    type: Literal["text", "thinking", "tool_use"]
    text: str | msgspec.UnsetType = msgspec.UNSET
    citations: msgspec.UnsetType | None = msgspec.UNSET
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    signature: str | msgspec.UnsetType = msgspec.UNSET
    """In a thinking block: a checksum, to be sent back with it."""
    id: str | msgspec.UnsetType = msgspec.UNSET
    """In a tool call: its id, which its `tool_result` refers to."""
    name: str | msgspec.UnsetType = msgspec.UNSET
    caller: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    input: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    partial_json: str | msgspec.UnsetType = msgspec.UNSET
    """In a call whose arguments were cut or are not a JSON object: their text."""


class MessageUsageFields(msgspec.Struct, frozen=True):
    input_tokens: int
    """Tokens of the prompt that were not found in the cache."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: str
    output_tokens_details: dict[str, int] | None
    server_tool_use: None
    cache_creation: None
    inference_geo: None
    speed: None


class MessageObject(msgspec.Struct, frozen=True):
    id: str
    type: str
    role: str
    model: str
    content: list[ContentBlockFields]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    """None: the message is not complete, and `resume` has the fields that continue it."""
    stop_sequence: str | None
    stop_details: None
    container: None
    diagnostics: None
    usage: MessageUsageFields
    completion_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    num_text_tokens: int | msgspec.UnsetType = msgspec.UNSET
    error: ErrorFields | msgspec.UnsetType = msgspec.UNSET
    seed: int | msgspec.UnsetType = msgspec.UNSET
    resume: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class InputTokensCount(msgspec.Struct, frozen=True):
    object: str
    input_tokens: int


class MessageTokensCount(msgspec.Struct, frozen=True):
    input_tokens: int


class EmbeddingFields(msgspec.Struct, frozen=True):
    object: str
    index: int
    embedding: list[float] | str
    """A list of numbers, or base64 of float32 values if the request asks for it."""


class EmbeddingsResponse(msgspec.Struct, frozen=True):
    object: str
    data: list[EmbeddingFields]
    model: str


class PooledFields(msgspec.Struct, frozen=True):
    object: str
    index: int
    data: list[float] | str
    """The vector; a string with `encoding_format` base64."""


class PoolingResponse(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    data: list[PooledFields]
    usage: dict[str, int]


class TokenizerInfoResponse(msgspec.Struct, frozen=True):
    model: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


class RerankDocument(msgspec.Struct, frozen=True):
    text: str


class RerankResult(msgspec.Struct, frozen=True):
    index: int
    """Place of the document in the request."""
    relevance_score: float
    """Cosine of the angle between the vectors of query and document, from -1 to 1."""
    document: RerankDocument | msgspec.UnsetType = msgspec.UNSET


class RerankResponse(msgspec.Struct, frozen=True):
    id: str
    model: str
    results: list[RerankResult]
    """The most similar document comes first."""
    usage: dict[str, int]


class ScoreFields(msgspec.Struct, frozen=True):
    object: str
    index: int
    score: float
    """Cosine of the angle between the vectors of the two texts, from -1 to 1."""


class ScoreResponse(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    data: list[ScoreFields]
    usage: dict[str, int]


class TokenizeResponse(msgspec.Struct, frozen=True):
    tokens: list[int]
    count: int


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str


class OllamaCallFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any]


class OllamaCallFields(msgspec.Struct, frozen=True):
    id: str
    function: OllamaCallFunction


class OllamaMessageFields(msgspec.Struct, frozen=True):
    role: str
    content: str
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[OllamaCallFields] | msgspec.UnsetType = msgspec.UNSET


class OllamaAnswerFields(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    created_at: str
    done: bool
    done_reason: str
    """`stop`, `length` or `abort`; `load` if the request had no prompt."""
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    """Durations are in nanoseconds."""
    load_duration: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET
    """Tokens of the prompt."""
    prompt_eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    """Time to the first token."""
    eval_count: int | msgspec.UnsetType = msgspec.UNSET
    """Tokens of the output."""
    eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class OllamaChatResponse(OllamaAnswerFields, frozen=True, kw_only=True):
    message: OllamaMessageFields


class OllamaGenerateResponse(OllamaAnswerFields, frozen=True, kw_only=True):
    response: str
    thinking: str | msgspec.UnsetType = msgspec.UNSET


class OllamaEmbedResponse(msgspec.Struct, frozen=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaModelDetails(msgspec.Struct, frozen=True):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModelFields(msgspec.Struct, frozen=True):
    name: str
    model: str
    size: int
    """Bytes of the weights' files."""
    digest: str
    """Hash of everything that decides the numerics."""
    details: OllamaModelDetails
    modified_at: str | msgspec.UnsetType = msgspec.UNSET
    expires_at: str | msgspec.UnsetType = msgspec.UNSET
    context_length: int | msgspec.UnsetType = msgspec.UNSET


class OllamaModelList(msgspec.Struct, frozen=True):
    models: list[OllamaModelFields]


class OllamaShowResponse(msgspec.Struct, frozen=True):
    license: str
    modelfile: str
    parameters: str
    template: str
    details: OllamaModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    """`completion`, and `tools` and `thinking` if the model can do that."""
    modified_at: str


class AbortResponse(msgspec.Struct, frozen=True):
    aborted: list[str]
    unknown: list[str]
    """Names that match no running or stored request, or only another caller's."""


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    """The longest prompt plus output, in tokens."""

    root: str | msgspec.UnsetType = msgspec.UNSET
    """The model's own name, if `id` is an alias or a route."""
    meta: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """Architecture, precision, size in bytes, fingerprint, and what answers may contain (`capabilities`)."""


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
    "/v1/responses/input_tokens": InputTokensCount,
    "/v1/responses/compact": CompactedResponseObject,
    "/v1/responses/{response_id}": ResponseObject,
    "/v1/responses/{response_id}/cancel": ResponseObject,
    "/v1/responses/{response_id}/input_items": InputItemsPage,
    "/v1/messages": MessageObject,
    "/v1/messages/count_tokens": MessageTokensCount,
    "/v1/embeddings": EmbeddingsResponse,
    FILES_PATH: FileList,
    batch_routes.FILE_PATH: FileObject,
    batch_routes.BATCHES_PATH: BatchObject,
    batch_routes.BATCH_PATH: BatchObject,
    batch_routes.CANCEL_PATH: BatchObject,
    "/pooling": PoolingResponse,
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), RerankResponse),
    **dict.fromkeys(("/v1/score", "/score"), ScoreResponse),
    "/tokenizer_info": TokenizerInfoResponse,
    "/api/chat": OllamaChatResponse,
    "/api/generate": OllamaGenerateResponse,
    "/api/embed": OllamaEmbedResponse,
    "/api/show": OllamaShowResponse,
    "/api/tags": OllamaModelList,
    "/api/ps": OllamaModelList,
    "/api/version": VersionResponse,
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
"""Response struct by path, if the body has a fixed form. For a generating endpoint: the body without `stream`."""

RESPONSES_BY_METHOD: dict[tuple[str, str], type[msgspec.Struct]] = {
    ("DELETE", "/v1/responses/{response_id}"): DeletedResponse,
    ("POST", FILES_PATH): FileObject,
    ("DELETE", batch_routes.FILE_PATH): DeletedFile,
    ("GET", batch_routes.BATCHES_PATH): BatchList,
}
"""Response struct by method and path, if the methods of one path have different responses."""
