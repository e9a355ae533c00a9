"""`onward status URL`: shows the instances behind a router and their state, or one instance by itself. `--json` is for
scripts:

{"instances": [{id, name, node, role, model, model_aliases, state, url, incarnation, load, blocks, streams, pids}],
 "resumes": [...], "waiting": {model: requests that wait for an instance}}
"""

import argparse
import sys
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from onward.cli import admin_client
from onward.cli.admin_client import AdminClient
from onward.errors import NotFound, ServerError
from onward.obs.tables import print_table

STATUS_PATH = "/internal/status"
MAX_RESUMES_SHOWN = 10
STYLES = {"ready": "green", "suspect": "yellow", "draining": "yellow", "restarting": "yellow", "gone": "red"}


class InstanceStatus(msgspec.Struct, frozen=True):
    id: str
    role: str
    state: str
    url: str
    incarnation: str
    model: str = ""
    name: str = ""
    node: str = ""
    load: Any = None
    blocks: Any = None
    streams: int = 0
    pids: dict[str, list[int]] = {}
    oom_kills: dict[str, int] = {}


class ClusterStatus(msgspec.Struct, frozen=True):
    instances: list[InstanceStatus]
    resumes: list[dict[str, Any]] = []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    admin_client.add_arguments(parser, "a router or an instance")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def run(args: argparse.Namespace) -> int:
    server = admin_client.admin_client_from_args(args)
    document = fetch(server)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")
        return 0
    try:
        status = msgspec.convert(document, ClusterStatus)
    except msgspec.ValidationError as fault:
        raise ServerError(f"{server.url} speaks another version: {fault}") from None
    console = Console(highlight=False)
    show(console, status)
    return 0


def fetch(server: AdminClient) -> Any:
    try:
        return server.get(STATUS_PATH)
    except NotFound:
        pass
    try:
        return document_of(server.url, server.get("/info"))
    except NotFound:
        raise NotFound(f"{server.url} is neither a router nor an instance") from None


def document_of(url: str, info: Any) -> dict[str, Any]:
    """Returns the description of a single instance in the form that a router uses."""
    try:
        engine, requests = info["engine"], info["requests"]
        state = info.get("state") or ("ready" if engine and engine["worker_ready"] else "restarting")
        running, blocks = requests.get("running", 0), info["kv_blocks"]
        row = {
            "id": info["incarnation"],
            "name": info.get("configuration", {}).get("instance_name", ""),
            "node": info.get("configuration", {}).get("node_name", ""),
            "role": info["role"],
            "model": info.get("model", {}).get("id", ""),
            "model_aliases": info.get("model", {}).get("aliases", []),
            "state": state,
            "url": url,
            "incarnation": info["incarnation"],
            "load": {"running": running, "waiting": sum(requests.values()) - running},
            "blocks": {"free": blocks.get("free", 0) + blocks.get("cached", 0), "total": sum(blocks.values())},
            "streams": info.get("streams", sum(requests.values())),
            "pids": info["pids"],
            "oom_kills": info.get("oom_kills", {}),
        }
    except (KeyError, TypeError, AttributeError):
        raise ServerError(f"{url}/info does not describe an instance; is it an Onward server?") from None
    return {"instances": [row], "resumes": [], "waiting": {}}


def show(console: Console, status: ClusterStatus) -> None:
    if not status.instances:
        console.print("no instance has registered")
    else:
        print_table(console, _instances(status.instances))
        for instance in status.instances:
            if any(instance.oom_kills.values()):
                kills = format_value(instance.oom_kills, names_first=True)
                console.print(
                    f"\nkilled by the kernel for lack of memory in {instance.id}: {kills}", style="red", markup=False
                )
    if status.resumes:
        console.print("\nlast resumes", style="bold")
        print_table(console, _resumes(status.resumes[-MAX_RESUMES_SHOWN:]))


def _instances(instances: list[InstanceStatus]) -> Table:
    node = ("node",) if any(instance.node for instance in instances) else ()
    table = _table("instance", *node, "model", "role", "state", "url", "load", "blocks", "streams", "pids")
    for instance in instances:
        table.add_row(
            Text(instance.id),
            *([Text(instance.node)] if node else []),
            Text(instance.model),
            Text(instance.role),
            Text(instance.state, STYLES.get(instance.state, "")),
            Text(instance.url),
            Text(format_value(_only(instance.load, "running", "waiting"))),
            Text(format_value(instance.blocks)),
            str(instance.streams),
            Text(
                format_value(
                    {role: " ".join(map(str, pids)) for role, pids in instance.pids.items() if pids}, names_first=True
                )
            ),
        )
    return table


def _only(value: Any, *names: str) -> Any:
    """Returns the named fields only, since a table has no room for more."""
    return {name: value[name] for name in names if name in value} if isinstance(value, dict) else value


def _resumes(resumes: list[dict[str, Any]]) -> Table:
    """Returns the table of resumes. The names in the router's answer are its columns."""
    columns = list(dict.fromkeys(name for resume in resumes for name in resume))
    table = _table(*(name.removesuffix("_s") for name in columns))
    for resume in resumes:
        table.add_row(*(Text(format_value(resume.get(name))) for name in columns))
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def format_value(value: Any, *, names_first: bool = False) -> str:
    """Returns a value as text: `{"running": 2, "waiting": 0}` -> `2 running`. Zeros are left out, unless all are
    zero."""
    if isinstance(value, dict):
        parts = {name: format_value(part) for name, part in value.items() if part} or dict.fromkeys(
            list(value)[:1], "0"
        )
        return ", ".join(f"{name} {part}" if names_first else f"{part} {name}" for name, part in parts.items())
    if isinstance(value, float):
        return f"{value:.3g}"
    return "" if value is None else str(value)
