"""Deliberate bugs of /v1/responses/compact."""

from typing import Any

import msgspec

from onward.web.openai_api import compact_endpoint, compaction
from tests.sabotage.patches import Patches, Sabotage

COMPACT = "tests/api/responses/test_compact.py::"


def _return_cut_summaries(patch: Patches) -> None:
    def compacted(original: Any, items: list[Any], answer: bytes) -> bytes:
        fields = msgspec.json.decode(answer) | {"status": "completed"}
        return original(items, msgspec.json.encode(fields))

    patch.around(compact_endpoint, "compacted_body", compacted)


TABLE = [
    Sabotage(
        "cut-summary",
        "a summary that was cut stands for the conversation",
        _return_cut_summaries,
        [COMPACT + "test_a_summary_that_was_cut_is_refused"],
    ),
    Sabotage(
        "user-messages-lost",
        "a compacted conversation lacks the user's messages",
        lambda patch: patch.put(compaction, "user_messages", lambda items: []),
        [COMPACT + "test_the_items_of_a_stored_response_are_compacted"],
    ),
]
