"""The request body of `/v1/messages`."""

from typing import Any

import msgspec

from onward.web.anthropic_api.message_prompt import MessagePromptFields
from onward.web.json_body import decode_raw, field_error

_REFUSED = ("container", "mcp_servers")
"""Refused fields: they ask for work that Anthropic's servers do for a model."""
_NO_EFFECT = frozenset({"cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id"})
"""Fields that do not change the response. Prefixes are cached without `cache_control`."""


class CountTokensRequest(MessagePromptFields, frozen=True, kw_only=True):
    """A request to count the tokens of a prompt. Fields about the output are accepted and have no effect."""

    max_tokens: int | None = None


class CreateMessageRequest(MessagePromptFields, frozen=True, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    generated_token_ids: list[int | list[int]] | None = None
    """Tokens of an earlier response. The new response returns the whole message, including the text of these tokens."""
    completion_token_ids: list[int | list[int]] | None = None
    """Another name of generated_token_ids."""
    generated_finish_reasons: list[str | None] | None = None
    """Only `[null]`, as in the `resume` field of an incomplete message. A message that has ended is not continued."""


def supported_fields(struct: type[msgspec.Struct]) -> frozenset[str]:
    """Returns the names of the fields that are read, that have no effect, or that `check_refused_fields` handles."""
    return frozenset(struct.__struct_fields__) | _NO_EFFECT | frozenset(_REFUSED)


def check_refused_fields(fields: dict[str, msgspec.Raw], body: bytes) -> None:
    for name in _REFUSED:
        if name in fields and decode_raw(fields[name], body) not in (None, [], {}):
            raise field_error(name, "not supported by this server")


def output_schema(request: MessagePromptFields) -> dict[str, Any] | None:
    """Returns the chat's `response_format`."""
    output_format = None if request.output_config is None else request.output_config.format
    if output_format is None:
        return None
    path = "output_config.format"
    if output_format.get("type") != "json_schema":
        raise field_error(f"{path}.type", "only 'json_schema' is supported")
    if not isinstance(output_format.get("schema"), dict):
        raise field_error(f"{path}.schema", "is required: a JSON schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": output_format["schema"]}}
