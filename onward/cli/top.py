"""`onward top URL`: the live view of `/ui` in a terminal, until Ctrl-C. `--once` prints one snapshot and ends.

Reads the same event stream as the page. All text of a server is shown without terminal sequences.
"""

import argparse
from collections import Counter
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from onward.cli import admin_client
from onward.cli.admin_client import AdminClient
from onward.cli.status import STYLES
from onward.errors import ServerError
from onward.proto.live import BLOCK_STATES, LiveEngine

LIVE_PATH, SNAPSHOT_PATH = "/ui/live", "/ui/snapshot"
MAX_STREAMS_SHOWN = 40
MAX_INSTANCES_SHOWN = 16
STATE_STYLES = {
    "prefilling": "yellow",
    "decoding": "green",
    "preempting": "red",
    "waiting_for_kv": "magenta",
    "waiting": "bright_black",
    "offered": "magenta",
}
BLOCK_STYLES = {
    "cached": "blue",
    "owned": "green",
    "fenced": "yellow",
    "leased": "magenta",
    "sending": "magenta",
    "quarantined": "red",
    "free": "bright_black",
}
_NAMES_OF_BLOCKS = {char: name for name, char in BLOCK_STATES.items()}


class TopProcess(msgspec.Struct, frozen=True):
    role: str
    pid: int
    state: str = ""


class TopInstance(msgspec.Struct, frozen=True):
    id: str
    role: str
    state: str
    model: str = ""
    processes: list[TopProcess] = []
    restarts: dict[str, int] = {}
    engine: LiveEngine | None = None


class TopStream(msgspec.Struct, frozen=True):
    """A stream as a router describes it."""

    id: str
    label: str = ""
    caller: str = ""
    instance: str | None = None
    is_paused: bool = False
    attempt: int = 1
    num_tokens: int = 0
    age_s: float = 0.0


class TopView(msgspec.Struct, frozen=True):
    at_s: float
    role: str
    instances: list[TopInstance]
    streams: list[TopStream] = []
    resumes: list[dict[str, Any]] = []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    admin_client.add_arguments(parser, "a router or an instance")
    parser.add_argument(
        "--once", action="store_true", help="print the state once and exit; the default without a terminal"
    )


def run(args: argparse.Namespace) -> int:
    server, console = admin_client.admin_client_from_args(args), Console(highlight=False)
    if args.once or not console.is_terminal:
        console.print(render(decode_view(server, server.get(SNAPSHOT_PATH)), None))
        return 0
    watch(server, console)
    return 0


def watch(server: AdminClient, console: Console) -> None:
    previous: TopView | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for document in server.events(LIVE_PATH):
            view = decode_view(server, document)
            live.update(render(view, previous), refresh=True)
            previous = view


def decode_view(server: AdminClient, document: Any) -> TopView:
    if isinstance(document, dict) and "error" in document:
        raise ServerError(f"{server.url}: {document['error'].get('message', 'an error')}")
    try:
        return msgspec.convert(document, TopView)
    except msgspec.ValidationError as fault:
        raise ServerError(f"{server.url} speaks another version: {fault}") from None


def render(view: TopView, previous: TopView | None) -> RenderableType:
    """Returns the screen. `previous` is an earlier view, for rates."""
    parts: list[RenderableType] = [_headline(view, previous), Text()]
    for instance in view.instances[:MAX_INSTANCES_SHOWN]:
        parts += [*_instance(instance), Text()]
    parts.append(_streams(view))
    return Group(*parts)


def tokens_per_second(view: TopView, previous: TopView | None) -> float | None:
    """Returns the rate of the engines that are in both views. A restarted engine counts from zero, and is left out
    once."""
    if previous is None or view.at_s <= previous.at_s:
        return None
    before = {one.id: one.engine.num_generated_tokens for one in previous.instances if one.engine is not None}
    made = [
        one.engine.num_generated_tokens - before[one.id]
        for one in view.instances
        if one.engine is not None and one.id in before
    ]
    return sum(max(0, number) for number in made) / (view.at_s - previous.at_s)


def _headline(view: TopView, previous: TopView | None) -> Text:
    engines = [one.engine for one in view.instances if one.engine is not None]
    rate = tokens_per_second(view, previous)
    facts = [
        f"{len(view.instances)} instance{'' if len(view.instances) == 1 else 's'}",
        f"{sum(engine.num_requests - engine.num_waiting for engine in engines)} running",
        f"{sum(engine.num_waiting for engine in engines)} waiting",
        *([f"{rate:.1f} tokens/s"] if rate is not None else []),
    ]
    return Text.assemble((f"onward {view.role}", "bold"), "  ", " · ".join(facts))


def _instance(instance: TopInstance) -> list[RenderableType]:
    title = Text.assemble(
        (plain(instance.id), "bold"),
        "  ",
        (plain(instance.state), STYLES.get(instance.state, "")),
        f"  {plain(instance.role)}",
        f"  {plain(instance.model)}",
    )
    processes = ", ".join(
        f"{plain(one.role)} {one.pid}"
        + (f" (restarted {number}×)" if (number := instance.restarts.get(one.role)) else "")
        for one in instance.processes
    )
    lines: list[RenderableType] = [title, *([Text("  " + processes, "bright_black")] if processes else [])]
    if instance.engine is not None:
        lines += [_slots(instance.engine), _blocks(instance.engine)]
    return lines


def _slots(engine: LiveEngine) -> Text:
    by_slot = {one.slot: one.state for one in engine.requests if one.slot is not None}
    line = Text("  slots   ")
    for slot in range(min(engine.num_slots, 256)):
        state = by_slot.get(slot)
        line.append("■" if state else "·", STATE_STYLES.get(state or "", "bright_black"))
    return line


def _blocks(engine: LiveEngine) -> Text:
    """Returns at most as many cells of the block map as fit a line, and then the counts."""
    step = max(1, -(-len(engine.block_map) // 64))
    line = Text("  blocks  ")
    for char in engine.block_map[::step]:
        name = _NAMES_OF_BLOCKS.get(char, "free")
        line.append("·" if name == "free" else "■", BLOCK_STYLES[name])
    counts = ", ".join(f"{number} {name}" for name, number in engine.kv_blocks.items() if number)
    return line.append(f"  {counts}", "bright_black")


def _streams(view: TopView) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    is_router = view.role == "router"
    titles = (
        "stream",
        "caller",
        *(("instance", "attempt") if is_router else ()),
        "state",
        "tokens",
        "first",
        "preempted",
    )
    for title in titles:
        table.add_column(title, no_wrap=True, style=None if title != "stream" else "cyan")
    requests = {one.id: one for instance in view.instances if instance.engine for one in instance.engine.requests}
    routed = {one.id: one for one in view.streams}
    shown = list(routed) if is_router else list(requests)
    for request_id in shown[:MAX_STREAMS_SHOWN]:
        request, stream = requests.get(request_id), routed.get(request_id)
        known = stream or request
        assert known is not None, "it is in one of the lists"
        state = "resuming" if stream is not None and stream.is_paused else request.state if request else "waiting"
        num_tokens = stream.num_tokens if stream is not None else request.num_generated_tokens if request else 0
        first_token_s = request.first_token_s if request is not None else None
        table.add_row(
            Text(plain(known.label or known.id)[:40]),
            Text(plain(known.caller)),
            *((Text(plain(stream.instance or "–")), Text(str(stream.attempt))) if stream is not None else ()),
            Text(state.replace("_", " "), STATE_STYLES.get(state, "red")),
            Text(str(num_tokens)),
            Text("" if first_token_s is None else f"{first_token_s:.2f} s"),
            Text(str(request.num_preemptions) if request is not None and request.num_preemptions else ""),
        )
    states = Counter(one.state for one in requests.values())
    more = len(shown) - MAX_STREAMS_SHOWN
    tail = Text(f"and {more} more", "bright_black") if more > 0 else Text()
    summary = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in states.items())
    return Group(Text(f"streams  {summary or 'none'}", "bold"), table, tail)


def plain(text: str) -> str:
    """Returns the text with each unprintable character replaced by U+FFFD, so that it cannot control the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
