"""From a body to a request that was checked: one function for each endpoint that generates."""

from typing import TypeVar

import msgspec

from onward.api import request_checks
from onward.api.known_fields import check_known
from onward.api.requests import Bounds, ChatRequest, CompletionRequest, GenerationRequest, TokenRequest
from onward.errors import NotFound
from onward.web.body import decode, decode_fields, short

RequestT = TypeVar("RequestT", bound=GenerationRequest)

_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_token_decoder = msgspec.json.Decoder(TokenRequest)


def decode_chat(body: bytes, bounds: Bounds) -> tuple[ChatRequest, tuple[str, ...]]:
    """The request, and the names of its fields that this server does not know."""
    request, unknown = _decode(body, _chat_decoder, ChatRequest, bounds)
    request_checks.check_chat(request, bounds)
    return request, unknown


def decode_completion(body: bytes, bounds: Bounds) -> tuple[CompletionRequest, tuple[str, ...]]:
    request, unknown = _decode(body, _completion_decoder, CompletionRequest, bounds)
    request_checks.check_completion(request, bounds)
    return request, unknown


def decode_tokens(body: bytes, bounds: Bounds) -> tuple[TokenRequest, tuple[str, ...]]:
    request, unknown = _decode(body, _token_decoder, TokenRequest, bounds)
    request_checks.check_tokens(request, bounds)
    return request, unknown


def _decode(
    body: bytes, decoder: "msgspec.json.Decoder[RequestT]", struct: type[RequestT], bounds: Bounds
) -> tuple[RequestT, tuple[str, ...]]:
    unknown = check_known(decode_fields(body), body, struct.__struct_fields__)
    request = decode(body, decoder)
    check_model(request.model, bounds)
    return request, unknown


def check_model(model: str, bounds: Bounds) -> None:
    if model != bounds.model:
        problem = f"model: {short(model)} is not served here; {bounds.model!r} is"
        raise NotFound(problem, code="model_not_found", param="model")
