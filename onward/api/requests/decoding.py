"""From a body to a request that was checked: one function for each endpoint that generates."""

from typing import TypeVar

import msgspec

from onward.api.requests import validation
from onward.api.requests.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
    GenerationRequest,
    ValidationContext,
)
from onward.api.requests.unsupported_fields import check_field_names
from onward.errors import NotFound
from onward.web.json_body import decode, decode_fields, short_repr

RequestT = TypeVar("RequestT", bound=GenerationRequest)

_chat_decoder = msgspec.json.Decoder(ChatCompletionRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_token_decoder = msgspec.json.Decoder(GenerateRequest)


def decode_chat(body: bytes, context: ValidationContext) -> tuple[ChatCompletionRequest, tuple[str, ...]]:
    """The request, and the names of its fields that this server does not know."""
    request, unknown = _decode(body, _chat_decoder, ChatCompletionRequest, context)
    validation.check_chat(request, context)
    return request, unknown


def decode_completion(body: bytes, context: ValidationContext) -> tuple[CompletionRequest, tuple[str, ...]]:
    request, unknown = _decode(body, _completion_decoder, CompletionRequest, context)
    validation.check_completion(request, context)
    return request, unknown


def decode_tokens(body: bytes, context: ValidationContext) -> tuple[GenerateRequest, tuple[str, ...]]:
    request, unknown = _decode(body, _token_decoder, GenerateRequest, context)
    validation.check_tokens(request, context)
    return request, unknown


def _decode(
    body: bytes, decoder: "msgspec.json.Decoder[RequestT]", struct: type[RequestT], context: ValidationContext
) -> tuple[RequestT, tuple[str, ...]]:
    unknown = check_field_names(decode_fields(body), body, struct.__struct_fields__)
    request = decode(body, decoder)
    check_model(request.model, context)
    return request, unknown


def check_model(model: str, context: ValidationContext) -> None:
    if model != context.model:
        problem = f"model: {short_repr(model)} is not served here; {context.model!r} is"
        raise NotFound(problem, code="model_not_found", param="model")
