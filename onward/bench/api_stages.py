"""Where an api process's time goes, by the stages that a token passes. Pure arithmetic over a profile."""

from collections.abc import Iterable

import msgspec

SOCKETS = "event loop and sockets"
"""What runs outside any function of Python: the loop itself, and what it asks of the kernel."""

STAGES: list[tuple[str, tuple[str, ...]]] = [
    ("from the engine: decode, ledger", ("/onward/transport/", "/zmq/", "/onward/api/ledger.py")),
    ("mailboxes, tasks", ("/onward/api/engine_client.py", "/asyncio/")),
    ("text: tokens to characters", ("/onward/api/answer.py", "/onward/api/choice.py", "/onward/text/")),
    (
        "events: JSON, cursors",
        (
            "/onward/api/forms.py",
            "/onward/api/chunks.py",
            "/onward/api/cursors.py",
            "/onward/api/chat.py",
            "/onward/api/completions.py",
            "/onward/api/continuing.py",
            "/onward/api/message_json.py",
            "/onward/proto/cursor.py",
            "/onward/web/sse.py",
        ),
    ),
    ("one request's course", ("/onward/api/",)),
    ("HTTP: framing, routes, bounds", ("/onward/web/", "/uvicorn/", "/starlette/", "/httptools/")),
]
"""The first whose part of a path fits."""
OTHER = "other"


class FunctionTime(msgspec.Struct, frozen=True):
    file: str
    name: str
    num_calls: int
    own_s: float


class Profile(msgspec.Struct, frozen=True):
    total_s: float
    """Processor time of the thread."""
    functions: list[FunctionTime]


def stage_of(file: str) -> str:
    return next((stage for stage, parts in STAGES if any(part in file for part in parts)), OTHER)


def shares(profile: Profile) -> dict[str, float]:
    """Of each stage, largest first."""
    spent: dict[str, float] = {}
    for one in profile.functions:
        stage = stage_of(one.file)
        spent[stage] = spent.get(stage, 0.0) + one.own_s
    spent[SOCKETS] = max(0.0, profile.total_s - sum(spent.values()))
    return {stage: spent[stage] / profile.total_s for stage in sorted(spent, key=lambda one: -spent[one])}


def dearest(functions: Iterable[FunctionTime], count: int) -> list[FunctionTime]:
    return sorted(functions, key=lambda one: -one.own_s)[:count]
