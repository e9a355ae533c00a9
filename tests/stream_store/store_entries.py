"""Entries as a stream store is given them."""

from typing import Any

from onward.proto.stream_store import StoreEntry


def record_of(name: str, **fields: Any) -> StoreEntry:
    usual: dict[str, Any] = {
        "aliases": (),
        "caller": "",
        "kind": "detached",
        "attempt_epoch": 1,
        "data": b"tokens",
        "ttl_s": 60.0,
    }
    return StoreEntry(request_id=name, **(usual | fields))
