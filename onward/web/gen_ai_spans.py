"""Name and attributes of a request's server span, by OpenTelemetry's conventions for generative AI and for HTTP.
Attributes that the conventions do not define begin with `onward.`. A span never contains a prompt, an output or a
key."""

from typing import Any

import msgspec

from onward.obs.request_trace import Attribute

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/generate": "text_completion",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/api/embed": "embeddings",
    "/v1/embeddings": "embeddings",
    "/pooling": "embeddings",
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), "embeddings"),
    **dict.fromkeys(("/v1/score", "/score"), "embeddings"),
}
"""Paths that are traced, with their `gen_ai.operation.name`."""
MAX_TEXT = 128
"""Characters of a client's own text, such as the name of a model."""

PROVIDER = "onward"


class _TracedFields(msgspec.Struct, frozen=True):
    """Fields that become attributes. They are validated elsewhere; a value of the wrong type is left out of the
    span."""

    model: Any = None
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    seed: Any = None
    n: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None


_decoder = msgspec.json.Decoder(_TracedFields)
_NUMBERS = ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")


def describe_body(path: str, body: bytes) -> tuple[str, dict[str, Attribute]]:
    """Returns the span's name, and attributes for the request's fields."""
    try:
        fields = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        fields = _TracedFields()
    operation = OPERATIONS.get(path, "text_completion")
    attributes: dict[str, Attribute] = {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER}
    model = fields.model[:MAX_TEXT] if isinstance(fields.model, str) else ""
    if model:
        attributes["gen_ai.request.model"] = model
    if isinstance(fields.stream, bool):
        attributes["gen_ai.request.stream"] = fields.stream
    limit = fields.max_completion_tokens or fields.max_output_tokens or fields.max_tokens
    if _is_number(limit):
        attributes["gen_ai.request.max_tokens"] = limit
    if _is_number(fields.n) and fields.n != 1:
        attributes["gen_ai.request.choice.count"] = fields.n
    for name in _NUMBERS:
        if _is_number(value := getattr(fields, name)):
            attributes[f"gen_ai.request.{name}"] = value
    return f"{operation} {model}".strip(), attributes


def _is_number(value: object) -> bool:
    """Returns whether the value is a number that OTLP can encode; its integers have 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or -(1 << 63) <= value < 1 << 63
