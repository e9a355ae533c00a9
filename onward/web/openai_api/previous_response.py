"""What a response goes on from: the items of earlier ones, put into its body before the first attempt at it.

So every attempt sees the same ones, also when the earlier response is gone. For the api, and for routers.
"""

import msgspec

from onward.web.json_body import compact_json, decode_raw, field_error, short_repr, undecoded_fields

CONTEXT_FIELD = "onward_context"
"""Ours: nobody else may write it."""
PREVIOUS_ID_FIELD = "previous_response_id"


def previous_response_id(fields: dict[str, msgspec.Raw], body: bytes) -> str | None:
    """The id of the earlier response, in a body that comes from a client. What is no id is for the decoder to refuse."""
    if CONTEXT_FIELD in fields:
        raise field_error(CONTEXT_FIELD, "not supported by this server")
    raw_id = fields.get(PREVIOUS_ID_FIELD)
    # Only a string is decoded: this runs in the event loop, and another value may be as large as the body.
    return decode_raw(raw_id, body) if raw_id is not None and bytes(memoryview(raw_id)[:1]) == b'"' else None


def with_previous_items(body: bytes, items: bytes, max_body_bytes: int) -> bytes:
    """`items`: a JSON list."""
    full_body = _joined(body, items)
    if len(full_body) > max_body_bytes:
        problem = f"with the items of earlier responses the body has {len(full_body)} bytes"
        raise field_error(PREVIOUS_ID_FIELD, f"{problem}, and at most {max_body_bytes} are allowed")
    return full_body


def is_same_request(known_body: bytes, body: bytes) -> bool:
    """Whether a client's body is the one that a known one was made from. What it goes on from may be gone by now."""
    body = compact_json(body)
    if known_body == body:
        return True
    items = undecoded_fields(known_body).get(CONTEXT_FIELD)
    return items is not None and known_body == _joined(body, bytes(items))


def _joined(body: bytes, items: bytes) -> bytes:
    return b'{"%b":%b,' % (CONTEXT_FIELD.encode(), items) + body.lstrip()[1:]


def not_finished_error(response_id: str) -> Exception:
    return field_error(PREVIOUS_ID_FIELD, f"{short_repr(response_id)} is not over yet")
