"""`onward drain URL`: an instance takes no more requests, and hands over or finishes those it has.

Exit status 0: nothing runs there any more, it can be stopped. 1: it could not be asked. 3: something still ran when the
time was over; the instance stays drained.
"""

import argparse
import math
import time
from typing import Any

from rich.console import Console

from onward.cli import admin_calls
from onward.cli.admin_calls import Server
from onward.cli.progress import StartProgress
from onward.clock import Clock, SystemClock
from onward.errors import InvalidRequest, NotFound, ServerError, Unavailable

POLL_S = 0.2
TIMED_OUT = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    admin_calls.add_arguments(parser, "the instance")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="how long to wait [%(default)s]")


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.timeout < math.inf:
        raise InvalidRequest("--timeout must be a number of seconds, and not negative", param="timeout")
    server = admin_calls.server_of(args)
    try:
        server.post("/drain")
    except NotFound as fault:
        raise NotFound(f"{fault.message}; only instances can be drained, is this one?") from None
    console = Console(stderr=True, highlight=False)
    with StartProgress(console) as progress:
        num_left = wait_until_empty(server, args.timeout, progress, SystemClock())
    if num_left == 0:
        console.print(f"{server.url} is drained: nothing runs there, it can be stopped", soft_wrap=True)
        return 0
    left = "it does not answer any more" if num_left is None else f"{num_left} still run"
    console.print(f"{server.url} is not empty after {args.timeout:g} s: {left}", soft_wrap=True)
    return TIMED_OUT


def wait_until_empty(server: Server, timeout_s: float, progress: StartProgress, clock: Clock) -> int | None:
    """How many are left when nothing is, or when the time is over; None if nobody could say at the end."""
    deadline_s = clock.now_s() + timeout_s
    most = 1
    while True:
        num_left = _ask(server)
        if num_left is None:
            progress.say("draining: no answer")
        else:
            most = max(most, num_left)
            progress(f"draining: {num_left} left", 1 - num_left / most)
        if num_left == 0 or clock.now_s() >= deadline_s:
            return num_left
        time.sleep(min(POLL_S, max(0.0, deadline_s - clock.now_s())))


def _ask(server: Server) -> int | None:
    """None if there is no answer: one of its processes may be restarting."""
    try:
        return num_left_of(server.get("/info"))
    except (Unavailable, ServerError):
        return None


def num_left_of(info: dict[str, Any]) -> int | None:
    """Requests, and prompts that were computed for others who have not read them yet. None if the instance does not know:
    without an engine the api processes hold what will be submitted again."""
    if not info.get("engine"):
        return None
    sending = info.get("kv_blocks", {}).get("sending", 0)
    return sum(info.get("requests", {}).values()) or int(sending > 0)
