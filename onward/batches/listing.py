"""Pages of a list, as OpenAI's API has them: `limit`, `after` and `order`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from onward.batches.records import BatchRecord, FileRecord
from onward.web.json_body import field_error, short_repr

Record = TypeVar("Record", FileRecord, BatchRecord)
ORDERS = ("asc", "desc")


@dataclass(frozen=True, slots=True)
class PageQuery:
    limit: int
    after: str | None
    order: str


def page_query(query: Mapping[str, str], default_limit: int, max_limit: int) -> PageQuery:
    limit, order = query.get("limit", str(default_limit)), query.get("order", "desc")
    if not limit.isascii() or not limit.isdigit() or len(limit) > 9 or not 1 <= int(limit) <= max_limit:
        raise field_error("limit", f"must be a number from 1 to {max_limit}, got {short_repr(limit)}")
    if order not in ORDERS:
        raise field_error("order", f"must be one of {', '.join(ORDERS)}, got {short_repr(order)}")
    return PageQuery(int(limit), query.get("after"), order)


def page_of(records: Sequence[Record], page: PageQuery) -> tuple[Sequence[Record], bool]:
    """Returns the records of a page, and whether there are more."""
    ordered = sorted(records, key=lambda record: (record.created_s, record.id), reverse=page.order == "desc")
    start = 0
    if page.after is not None:
        positions = [index for index, record in enumerate(ordered) if record.id == page.after]
        if not positions:
            raise field_error("after", f"there is no {short_repr(page.after)} of yours here")
        start = positions[0] + 1
    return ordered[start : start + page.limit], len(ordered) > start + page.limit
