"""A snapshot of an instance's work, for the live view of `/ui` and for `onward top`.

Its size is bounded, whatever the engine holds: a maximum number of requests, and of cells in the block map.
"""

from typing import Literal

import msgspec

from onward.proto.field_types import Count, Duration, Serial

MAX_LIVE_REQUESTS = 256
"""Requests that one view lists: those with a slot first, then the head of the queue."""
MAX_BLOCK_CELLS = 1024
"""Cells of the block map. A larger pool is sampled: each cell is one block out of several."""
MAX_SHOWN_LABEL = 64

LiveState = Literal["waiting", "prefilling", "decoding", "preempting", "waiting_for_kv", "offered"]

BLOCK_STATES = {
    "free": ".",
    "cached": "c",
    "owned": "o",
    "fenced": "f",
    "leased": "l",
    "sending": "s",
    "quarantined": "q",
}
"""The character of each state in `LiveEngine.block_map`."""


class LiveRequest(msgspec.Struct, frozen=True):
    """A choice of a request in the engine."""

    id: str
    """As clients know it."""
    state: LiveState
    label: str = ""
    """The client's own name for it, cut."""
    caller: str = ""
    slot: Count | None = None
    epoch: Serial = 0
    """The number of this submission: a higher one follows a crash."""
    num_prompt_tokens: Count = 0
    num_computed_tokens: Count = 0
    num_generated_tokens: Count = 0
    num_blocks: Count = 0
    num_preemptions: Count = 0
    age_s: Duration = 0.0
    """Since its arrival."""
    first_token_s: Duration | None = None
    """From its arrival to its first token here."""
    trace_id: str = ""
    """Set for a traced request."""


class LiveEngine(msgspec.Struct, frozen=True):
    step: Serial
    worker_ready: bool
    num_slots: Count
    block_size: Count
    kv_blocks: dict[str, Count]
    block_map: str
    """A character for each cell, see `BLOCK_STATES`."""
    blocks_per_cell: Count
    num_requests: Count
    num_waiting: Count
    num_generated_tokens: Serial
    """Tokens of all requests since the engine started; viewers compute the rate from differences."""
    num_preemptions: Serial
    requests: list[LiveRequest]


class QueryLive(msgspec.Struct, frozen=True, tag="query_live"):
    """From an api process to the supervisor, and from there to the engine: what is going on now?"""

    query_id: Serial


class LiveSnapshot(msgspec.Struct, frozen=True, tag="live_snapshot"):
    """The engine's answer."""

    query_id: Serial
    engine: LiveEngine | None
    """None while it starts."""
