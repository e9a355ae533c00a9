"""`GET /v1/responses/{id}/input_items`: what a response was made from, page by page."""

from collections.abc import Mapping
from typing import Any

from onward.api.responses.chat_request import ResponseChatRequest
from onward.web.json_body import field_error, short_repr
from onward.web.openai_api.response_items import Item, to_items

DEFAULT_LIMIT, MAX_LIMIT = 20, 100


def input_items_page(request: ResponseChatRequest, request_id: str, query: Mapping[str, str]) -> dict[str, Any]:
    """The latest first, unless the query says otherwise."""
    all_items = [*request.body.context, *to_items(request.body.input)]
    items = [_listed(item, request_id, index) for index, item in enumerate(all_items)]
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise field_error("order", f"must be asc or desc, got {short_repr(order)}")
    if order == "desc":
        items.reverse()
    items = items[_first(items, query.get("after")) :]
    limit = _limit(query.get("limit"))
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(items) > limit,
    }


def _first(items: list[Item], after: str | None) -> int:
    if after is None:
        return 0
    index = next((index for index, item in enumerate(items, 1) if item["id"] == after), None)
    if index is None:
        raise field_error("after", f"no item has the id {short_repr(after)}")
    return index


def _limit(value: str | None) -> int:
    if value is None:
        return DEFAULT_LIMIT
    if not value.isascii() or not value.isdigit() or not 1 <= int(value[:9]) <= MAX_LIMIT:
        raise field_error("limit", f"must be between 1 and {MAX_LIMIT}, got {short_repr(value)}")
    return int(value)


def _listed(item: Item, request_id: str, index: int) -> Item:
    """With the id and the status that clients may leave out, or say to be null, and words as a list of parts."""
    kind = item.get("type", "message")
    given_fields = {name: value for name, value in item.items() if value is not None}
    fields = {"id": f"in_{request_id}_{index}", "status": "completed"} | given_fields | {"type": kind}
    if kind == "message" and isinstance(item.get("content"), str):
        is_assistant = item.get("role") == "assistant"
        part = {"type": "output_text" if is_assistant else "input_text", "text": item["content"]}
        fields["content"] = [part | {"annotations": []} if is_assistant else part]
    if kind == "reasoning":
        fields.setdefault("summary", [])
    return fields
