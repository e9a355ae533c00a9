"""What a client may say to `/v1/responses`, as it stands in the body. What it comes to, `request` says."""

from typing import Any, Literal

import msgspec

from onward.api.requests.structured_outputs import SharedFields
from onward.errors import InvalidRequest
from onward.web.json_body import decode_raw

_REFUSED = frozenset(
    {
        "access_programs",
        "context_management",
        "conversation",
        "image",
        "max_tool_calls",
        "moderation",
        "prompt",
        "prompt_cache_options",
    }
)
"""Known, and not to be had here. `max_tool_calls` is about tools that OpenAI runs by itself."""
_LABELS = frozenset({"service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
"""For the books of whoever serves, or for speed alone."""


class UnsupportedField(InvalidRequest):
    """A field of this name."""


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None
    """Nothing is padded here, whatever it says."""


class ExtensionFields(SharedFields, frozen=True, kw_only=True):
    """Those of our chats that OpenAI's responses do not have. They mean the same here."""

    chat_template_kwargs: dict[str, Any] | None = None
    thinking_budget: int | None = None


class CreateResponseRequest(ExtensionFields, frozen=True, kw_only=True):
    model: str
    input: str | list[Any]
    """A text, or items: messages, thoughts, calls and what they gave."""
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: bool | None = None
    """The answer is made although nobody waits for it."""
    store: bool | None = None
    """Whether it can be asked for by its id later. By default it can."""
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    onward_context: list[Any] | None = None

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def context(self) -> list[Any]:
        return self.onward_context or []


def check_fields(fields: dict[str, msgspec.Raw], body: bytes) -> None:
    """Refuses what nobody here acts on, by its name: an answer that left it out would look like one that did not."""
    for name in fields.keys() - set(CreateResponseRequest.__struct_fields__) - _LABELS:
        if name in _REFUSED and decode_raw(fields[name], body) is None:
            continue
        raise UnsupportedField(f"{name[:80]}: not supported by this server", param=name[:80])
