"""The fields of a response object that repeat its request, with all fields that OpenAI's specification requires.

Api processes write responses. A router writes one only where no instance can: the failure that ends a stream.
"""

from typing import Any, Literal

import msgspec

from onward.web.openai_api.response_tools import supported_tools
from onward.web.openai_api.shared_fields import SharedFields

SERVICE_TIER = "default"
"""The only tier, whatever tier a request asks for."""
DEFAULT_VERBOSITY = "medium"
"""The verbosity of answers. A request may name another one, which has no effect."""


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class RepeatedFields(SharedFields, frozen=True, kw_only=True):
    """The fields of a request that its response repeats."""

    instructions: str | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    """Whether the response is generated although no connection waits for it."""
    store: bool | None = None
    """Whether the response is stored and can be retrieved by its id later. Default: true."""
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    """Repeated in the response. It limits calls of tools that the server runs, and this server runs none."""
    truncation: Literal["auto", "disabled"] | None = None
    """Repeated in the response. No input is cut: one that is too long is refused with both values."""
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    """An id of the end user, repeated in the response. It has no other effect."""
    prompt_cache_key: str | None = None
    """Repeated in the response. A router sends requests with the same key to the same instance."""

    @property
    def is_stored(self) -> bool:
        return self.store is not False


_lenient = msgspec.json.Decoder(RepeatedFields)


def repeated_fields(body: bytes) -> RepeatedFields:
    """Returns the fields of a body that may be invalid: then all have their defaults."""
    try:
        return _lenient.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return RepeatedFields()


class _ResponseTime(msgspec.Struct, frozen=True):
    completed_at: int | None = None


class _EventTime(msgspec.Struct, frozen=True):
    response: _ResponseTime = _ResponseTime()


_body_times = msgspec.json.Decoder(_ResponseTime)
_event_times = msgspec.json.Decoder(_EventTime)


def completed_at_of_body(body: bytes) -> int | None:
    """Returns when a response was completed. None: it was not, or its body cannot be read."""
    try:
        return _body_times.decode(body).completed_at
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def completed_at_of_event(event: bytes) -> int | None:
    """Returns when the response of an event was completed. `event`: its lines."""
    _, _, data = event.rpartition(b"\ndata: ")
    try:
        return _event_times.decode(data.strip()).response.completed_at
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def response_object(
    request: RepeatedFields, *, response_id: str, created_s: int, model: str, status: str, **outcome: Any
) -> dict[str, Any]:
    """Returns a response object. `outcome` has the fields that differ from those of a response without output."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_s,
        "completed_at": None,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "background": bool(request.background),
        "frequency_penalty": request.frequency_penalty or 0.0,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": request.presence_penalty or 0.0,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": _reasoning(request.reasoning),
        "safety_identifier": request.safety_identifier,
        "access_programs": None,
        "service_tier": SERVICE_TIER,
        "store": request.is_stored,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": _text_format(request.text), "verbosity": _verbosity(request.text)},
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": [_tool(tool) for tool in supported_tools(request.tools)],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
    } | outcome


def _reasoning(reasoning: ReasoningConfig | None) -> dict[str, Any]:
    if reasoning is None:
        return {"effort": None, "summary": None}
    return {"effort": reasoning.effort, "summary": reasoning.summary}


def _text_format(text: TextConfig | None) -> dict[str, Any]:
    text_format = None if text is None else text.format
    if text_format is None:
        return {"type": "text"}
    if text_format.get("type") != "json_schema":
        return text_format
    return {"description": None, "strict": False} | text_format


def _verbosity(text: TextConfig | None) -> str:
    return DEFAULT_VERBOSITY if text is None or text.verbosity is None else text.verbosity


def _tool(tool: Any) -> Any:
    """Returns a function with all of its fields. `strict` is null where the request leaves it open."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None} | tool
