"""Decodes and checks request bodies: one function for each endpoint that generates."""

from typing import Protocol, TypeVar

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
from onward.web.json_body import decode, decode_fields
from onward.web.openai_api.model_names import model_not_found

RequestT = TypeVar("RequestT", bound=GenerationRequest)

_chat_decoder = msgspec.json.Decoder(ChatCompletionRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_token_decoder = msgspec.json.Decoder(GenerateRequest)


def decode_chat(body: bytes, context: ValidationContext) -> tuple[ChatCompletionRequest, tuple[str, ...]]:
    """Returns the decoded and checked request, and the names of its unknown fields."""
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


def check_model(model: str | None, context: ValidationContext) -> None:
    """Raises if the model is not served. A request without a model, or with an empty one, means the served model."""
    if model and model not in context.model_names:
        raise model_not_found(model, context.model_names)


class _NamesModel(Protocol):
    @property
    def model(self) -> str | None: ...


StructT = TypeVar("StructT", bound=_NamesModel)


def with_served_model(request: StructT, context: ValidationContext) -> StructT:
    """Returns the request, with the name of the served model if it names none. Raises if its model is not served."""
    check_model(request.model, context)
    return request if request.model else msgspec.structs.replace(request, model=context.model)  # type: ignore[type-var]
