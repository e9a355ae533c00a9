"""Where an api process's time goes, by the stages that a token passes. Pure arithmetic over samples."""

from collections.abc import Sequence

import msgspec

STAGES: list[tuple[str, tuple[str, ...]]] = [
    ("the event loop itself, and tasks of other threads", ("/asyncio/runners.py", "/uvloop/", "/onward/api/main.py")),
    ("from the engine: decode, tracker", ("/onward/transport/", "/zmq/", "/onward/api/engine_link/request_tracker.py")),
    ("mailboxes, tasks", ("/onward/api/engine_link/engine_client.py", "/asyncio/")),
    (
        "text: tokens to characters",
        ("/onward/api/lifecycle/request_output.py", "/onward/api/lifecycle/choice_output.py", "/onward/text/"),
    ),
    (
        "events: JSON, cursors",
        (
            "/onward/api/lifecycle/stream_formatters.py",
            "/onward/api/lifecycle/chunk_encoder.py",
            "/onward/api/endpoints/chat.py",
            "/onward/api/endpoints/completions.py",
            "/onward/api/lifecycle/resume_fields.py",
            "/onward/api/endpoints/chat.py",
            "/onward/proto/cursor.py",
            "/onward/web/sse.py",
        ),
    ),
    ("writing to sockets, with HTTP's framing", ("/uvicorn/", "/onward/web/server/write_batcher.py")),
    ("one request's course", ("/onward/api/",)),
    ("HTTP: heads, routes, bounds", ("/onward/web/", "/starlette/", "/httptools/")),
]
"""The first whose part of a path fits."""
OTHER = "other"


class FunctionSamples(msgspec.Struct, frozen=True):
    file: str
    name: str
    count: int


def stage_of(file: str) -> str:
    return next((stage for stage, parts in STAGES if any(part in file for part in parts)), OTHER)


def shares(samples: Sequence[FunctionSamples]) -> dict[str, float]:
    """Returns the share of each stage, largest first."""
    found: dict[str, int] = {}
    for one in samples:
        stage = stage_of(one.file)
        found[stage] = found.get(stage, 0) + one.count
    total = sum(found.values())
    return {stage: found[stage] / total for stage in sorted(found, key=lambda one: -found[one])}
