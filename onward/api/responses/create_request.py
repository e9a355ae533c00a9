"""The request body of `/v1/responses`. `chat_request` converts it to a chat request."""

from typing import Any

import msgspec

from onward.errors import InvalidRequest
from onward.web.json_body import decode_raw
from onward.web.openai_api.response_object import RepeatedFields
from onward.web.openai_api.shared_fields import SharedFields

_REFUSED = frozenset(
    {
        "access_programs",
        "context_management",
        "conversation",
        "image",
        "moderation",
        "prompt",
        "prompt_cache_options",
    }
)
"""OpenAI's fields that this server does not support; `null` is accepted."""
_ADVICE = {"conversation": "; use previous_response_id"}


class UnsupportedField(InvalidRequest):
    """The request has a field that this server does not support. Its name is the client's own and is not renamed."""


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None
    """Accepted without effect: events are never padded."""


class CreateResponseRequest(RepeatedFields, frozen=True, kw_only=True):
    model: str | None = None
    """Default: the model that is served, if it is the only one."""
    input: str | list[Any]
    """A text, or a list of items: messages, reasoning, calls and their results."""
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_budget: int | None = None
    client_metadata: Any = None
    """Labels of the client program. Accepted without effect."""
    service_tier: Any = None
    """Accepted without effect: there is one tier."""
    prompt_cache_retention: Any = None
    """Accepted without effect: prefixes are cached as long as there is room."""
    onward_context: list[Any] | None = None

    @property
    def context(self) -> list[Any]:
        return self.onward_context or []


EXTENSION_FIELDS = (*SharedFields.__struct_fields__, "chat_template_kwargs", "thinking_budget")
"""Fields of our chat requests that OpenAI's responses do not have. They have the same meaning here."""


def check_fields(fields: dict[str, msgspec.Raw], body: bytes) -> None:
    """Refuses fields that this server does not act on: a response that ignored one would look as if it had been applied."""
    for name in fields.keys() - set(CreateResponseRequest.__struct_fields__):
        if name in _REFUSED and decode_raw(fields[name], body) is None:
            continue
        advice = _ADVICE.get(name, "")
        raise UnsupportedField(f"{name[:80]}: not supported by this server{advice}", param=name[:80])
