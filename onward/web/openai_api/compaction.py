"""`/v1/responses/compact`: shortens a conversation to the user's messages and a summary that the model writes.

The summary is in an item of the type `compaction`, which a later request has as input. The item's `encrypted_content` is
encoded and not encrypted: it has nothing but what the client has sent and the model has answered. Pure functions.
"""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any

import msgspec

from onward.errors import InvalidRequest
from onward.web.json_body import decode, decode_fields, field_error
from onward.web.openai_api.previous_response import PREVIOUS_ID_FIELD, previous_response_id
from onward.web.openai_api.response_ids import PREFIX
from onward.web.openai_api.shared_fields import SharedFields

COMPACTION = "compaction"
ITEM_PREFIX = "cmp_"
SUMMARY_HEADING = "Summary of the conversation so far:\n"
SUMMARY_REQUEST = (
    "Write a summary of this conversation, from which it can be continued without the messages above. Keep goals,"
    " decisions, facts, names, numbers, results of tools, and open tasks. Write the summary only."
)
_CONTENT_PREFIX = "onward1."
_CONTENT = re.compile(re.escape(_CONTENT_PREFIX) + r"([A-Za-z0-9_-]*={0,2})")
_OWN_FIELDS = ("stream", "input")


class CompactRequest(SharedFields, frozen=True, kw_only=True):
    model: str
    input: str | list[Any] | None = None
    """A text, or a list of items. Required without `previous_response_id`."""
    instructions: str | None = None
    previous_response_id: str | None = None
    """A stored response, whose items come before `input`."""
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    """Extension: maximum number of tokens of the summary."""
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_budget: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Any = None
    """Accepted without effect: prefixes are cached as long as there is room."""
    service_tier: Any = None
    """Accepted without effect: there is one tier."""


class SummaryAnswer(msgspec.Struct, frozen=True):
    """What is read of the response that has the summary."""

    id: str
    created_at: int
    status: str
    output: list[dict[str, Any]]
    usage: msgspec.Raw


_requests = msgspec.json.Decoder(CompactRequest)
_answers = msgspec.json.Decoder(SummaryAnswer)


def decode_compact(body: bytes) -> CompactRequest:
    """Returns the decoded request. Other fields are checked by the endpoint that writes the summary."""
    fields = decode_fields(body)
    previous_response_id(fields, body)  # refuses internal fields
    for name in sorted(fields.keys() - set(CompactRequest.__struct_fields__)):
        raise field_error(name[:80], "not supported by this server")
    request = decode(body, _requests)
    if not request.input and request.previous_response_id is None:
        raise field_error("input", f"is required without {PREVIOUS_ID_FIELD}")
    return request


def summary_request(request: CompactRequest) -> bytes:
    """Returns the body of the request for a response that has the summary."""
    given = {name: getattr(request, name) for name in CompactRequest.__struct_fields__ if name not in _OWN_FIELDS}
    fields = {name: value for name, value in given.items() if value is not None}
    prompt = {"type": "message", "role": "user", "content": SUMMARY_REQUEST}
    return msgspec.json.encode(fields | {"input": [*input_items(request), prompt], "store": False})


def input_items(request: CompactRequest) -> list[Any]:
    if isinstance(request.input, str):
        return [{"type": "message", "role": "user", "content": request.input}]
    return request.input or []


def compacted_body(items: list[Any], answer: bytes) -> bytes:
    """Returns the compacted conversation. `items`: all items of the conversation. `answer`: the response that has the
    summary. Raises `InvalidRequest` if that has no whole summary."""
    summary = _answers.decode(answer)
    request_id = summary.id.removeprefix(PREFIX)
    texts = [
        part["text"]
        for item in summary.output
        if item["type"] == "message"
        for part in item["content"]
        if part["type"] == "output_text"
    ]
    if summary.status != "completed" or not "".join(texts).strip():
        raise _no_summary(summary.status)
    item = {
        "id": f"{ITEM_PREFIX}{request_id}",
        "type": COMPACTION,
        "encrypted_content": encode_summary("".join(texts)),
    }
    kept = [_user_message(message, f"in_{request_id}_{index}") for index, message in enumerate(user_messages(items))]
    fields = {"id": summary.id, "object": "response.compaction", "created_at": summary.created_at}
    return msgspec.json.encode(fields | {"output": [*kept, item], "usage": summary.usage})


def user_messages(items: list[Any]) -> list[dict[str, Any]]:
    return [item for item in items if item.get("type", "message") == "message" and item.get("role") == "user"]


def encode_summary(summary: str) -> str:
    return _CONTENT_PREFIX + urlsafe_b64encode(summary.encode()).decode()


def compaction_message(item: dict[str, Any], path: str) -> dict[str, Any]:
    """Returns the message that shows a compaction item to the model. It is the assistant's, because many templates require
    that roles alternate and the user's messages are beside it."""
    content = item.get("encrypted_content")
    match = _CONTENT.fullmatch(content) if isinstance(content, str) else None
    problem = "must be what /v1/responses/compact of this server has returned"
    if match is None:
        raise field_error(f"{path}.encrypted_content", problem)
    try:
        summary = urlsafe_b64decode(match[1]).decode()
    except ValueError:
        raise field_error(f"{path}.encrypted_content", problem) from None
    return {"type": "message", "role": "assistant", "content": SUMMARY_HEADING + summary}


def _user_message(item: dict[str, Any], item_id: str) -> dict[str, Any]:
    content = item["content"]
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    return {"id": item.get("id") or item_id, "type": "message", "status": "completed", "role": "user", "content": parts}


def _no_summary(status: str) -> InvalidRequest:
    problem = (
        "the model has written no summary; nothing was compacted"
        if status == "completed"
        else "the summary did not end within the context or max_output_tokens; nothing was compacted"
    )
    return InvalidRequest(f"input: {problem}", code="no_summary", param="input")
