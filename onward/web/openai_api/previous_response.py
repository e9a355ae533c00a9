"""Adds the items of the previous response to a request's body, before the first attempt.

So every attempt sees the same items, even if the previous response is gone. Used by api processes and routers.
"""

import msgspec

from onward.web.json_body import compact_json, decode_raw, field_error, short_repr, undecoded_fields
from onward.web.openai_api.model_names import with_default_model

CONTEXT_FIELD = "onward_context"
"""An internal field, which clients may not send."""
PREVIOUS_ID_FIELD = "previous_response_id"


def previous_response_id(fields: dict[str, msgspec.Raw], body: bytes) -> str | None:
    """Returns the id of the previous response in a client's body, if any. A value that is not an id is left for the
    decoder to refuse."""
    if CONTEXT_FIELD in fields:
        raise field_error(CONTEXT_FIELD, "not supported by this server")
    raw_id = fields.get(PREVIOUS_ID_FIELD)
    # Only a string is decoded: this runs in the event loop, and another value may be as large as the body.
    return decode_raw(raw_id, body) if raw_id is not None and bytes(memoryview(raw_id)[:1]) == b'"' else None


def with_previous_items(body: bytes, items: bytes, max_body_bytes: int) -> bytes:
    """Returns the body with `items`, a JSON list. Raises an error if it becomes too large."""
    full_body = _joined(body, items)
    if len(full_body) > max_body_bytes:
        problem = f"with the items of earlier responses the body has {len(full_body)} bytes"
        raise field_error(PREVIOUS_ID_FIELD, f"{problem}, and at most {max_body_bytes} are allowed")
    return full_body


def is_same_request(known_body: bytes, body: bytes, model: str) -> bool:
    """Returns whether `known_body` was made from a client's body, which means `model` if it names none. It takes the
    previous items from `known_body`, because the previous response may be gone by now."""
    body = with_default_model(compact_json(body), model)
    if known_body == body:
        return True
    items = undecoded_fields(known_body).get(CONTEXT_FIELD)
    return items is not None and known_body == _joined(body, bytes(items))


def _joined(body: bytes, items: bytes) -> bytes:
    return b'{"%b":%b,' % (CONTEXT_FIELD.encode(), items) + body.lstrip()[1:]


def not_finished_error(response_id: str) -> Exception:
    return field_error(PREVIOUS_ID_FIELD, f"{short_repr(response_id)} is not over yet")
