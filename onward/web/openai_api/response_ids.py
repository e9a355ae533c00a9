"""Ids, routes and query parameters of responses, for api processes and routers."""

import re
from collections.abc import Mapping

from onward.errors import NotFound
from onward.web.auth.api_key_table import Caller
from onward.web.auth.owned_request_ids import owns_request_id
from onward.web.json_body import field_error, short_repr

PATH = "/v1/responses"
INPUT_TOKENS_PATH = PATH + "/input_tokens"
COMPACT_PATH = PATH + "/compact"
CANCEL, INPUT_ITEMS = "/cancel", "/input_items"
ITEM_PATH = PATH + "/{response_id}"
CANCEL_PATH, INPUT_PATH = ITEM_PATH + CANCEL, ITEM_PATH + INPUT_ITEMS
PREFIX = "resp_"

_ID = re.compile(PREFIX + "([0-9a-f]{32})")


def request_id_of_response(caller: Caller, response_id: str, param: str) -> str:
    """Returns the id of the request that makes the response. Raises the same `NotFound` for another caller's response
    as for one that never existed."""
    match = _ID.fullmatch(response_id)
    if match is None or not owns_request_id(caller, match[1]):
        raise response_not_found(response_id, param)
    return match[1]


def response_not_found(response_id: str, param: str = "response_id") -> NotFound:
    problem = f"{param}: no response {response_id[:80]!r} is held here: it was not stored, deleted, or too long ago"
    return NotFound(problem, code="response_not_found", param=param)


def is_stream(query: Mapping[str, str]) -> bool:
    value = query.get("stream", "false")
    if value not in ("true", "false"):
        raise field_error("stream", f"must be true or false, got {short_repr(value)}")
    if value == "false" and "starting_after" in query:
        raise field_error("starting_after", "only allowed with stream: true")
    return value == "true"


def starting_after(query: Mapping[str, str]) -> int:
    value = query.get("starting_after")
    if value is None:
        return -1
    if not value.isascii() or not value.isdigit() or len(value) > 9:
        raise field_error("starting_after", f"must be the number of an event, got {short_repr(value)}")
    return int(value)
