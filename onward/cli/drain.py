"""`onward drain URL`: an instance takes no more requests; its streams move to other instances, or end where they are.

Exit status 0: nothing runs there any more, and it is safe to stop the instance. 1: the command failed. 3:
requests still ran at the timeout; the instance stays drained.
"""

import argparse
import math
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from onward.cli import admin_client
from onward.cli.admin_client import AdminClient
from onward.cli.progress import ProgressDisplay
from onward.clock import Clock, SystemClock
from onward.errors import InvalidRequest, NotFound, ServerError, Unavailable

POLL_S = 0.2
TIMED_OUT = 3


@dataclass(frozen=True, slots=True)
class RemainingWork:
    """The work that an instance still has."""

    num_requests: int
    """Includes prompts that were computed for peers which have not read them yet."""
    num_moving: int
    """Streams that a router will continue at another instance."""
    num_ending_here: int
    """Streams that end where they are: of clients without a router, and of routers that have no other instance."""

    def describe(self) -> str:
        if not self.num_moving + self.num_ending_here:
            return f"{self.num_requests} requests left" if self.num_requests else "nothing runs"
        parts = []
        if self.num_moving:
            parts.append(f"{_streams(self.num_moving)} to move to other instances")
        if self.num_ending_here:
            parts.append(f"{_streams(self.num_ending_here)} to end here")
        return ", ".join(parts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    admin_client.add_arguments(parser, "the instance")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="how long to wait [%(default)s]")


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.timeout < math.inf:
        raise InvalidRequest("--timeout must be a number of seconds, and not negative", param="timeout")
    server, clock = admin_client.admin_client_from_args(args), SystemClock()
    remaining_before = _fetch_remaining(server)
    try:
        server.post("/drain")
    except NotFound as fault:
        raise NotFound(f"{fault.message}; only instances can be drained, is this one?") from None
    console = Console(stderr=True, highlight=False)
    description = "it does not say what runs" if remaining_before is None else remaining_before.describe()
    console.print(f"draining {server.url}: {description}", soft_wrap=True)
    started_s = clock.now_s()
    with ProgressDisplay(console) as progress:
        remaining = wait_until_drained(server, args.timeout, progress, clock)
    if remaining is not None and remaining.num_requests == 0:
        console.print(f"{server.url} is drained after {clock.now_s() - started_s:.0f} s: safe to stop", soft_wrap=True)
        return 0
    reason = "it does not answer any more" if remaining is None else remaining.describe()
    console.print(
        f"{server.url} is not drained after {args.timeout:g} s, and not safe to stop: {reason}", soft_wrap=True
    )
    console.print(f"wait on with `onward drain {server.url}`, or take it back with `onward undrain`", soft_wrap=True)
    return TIMED_OUT


def wait_until_drained(
    server: AdminClient, timeout_s: float, progress: ProgressDisplay, clock: Clock
) -> RemainingWork | None:
    """Waits until nothing runs or the time is over, and returns what is left. Returns None if the instance could not
    report it at the end."""
    deadline_s = clock.now_s() + timeout_s
    max_requests = 1
    while True:
        remaining = _fetch_remaining(server)
        if remaining is None:
            progress.show_message("draining: no answer")
        else:
            max_requests = max(max_requests, remaining.num_requests)
            progress(f"draining: {remaining.describe()}", 1 - remaining.num_requests / max_requests)
        if (remaining is not None and remaining.num_requests == 0) or clock.now_s() >= deadline_s:
            return remaining
        time.sleep(min(POLL_S, max(0.0, deadline_s - clock.now_s())))


def _fetch_remaining(server: AdminClient) -> RemainingWork | None:
    """Returns the remaining work, or None if there is no answer: one of the instance's processes may be restarting."""
    try:
        return remaining_work_of(server.get("/info"))
    except (Unavailable, ServerError, NotFound):
        return None


def remaining_work_of(info: dict[str, Any]) -> RemainingWork | None:
    """Returns the remaining work, or None if the instance does not know it: without an engine, api processes hold
    requests that they will submit again."""
    if not info.get("engine"):
        return None
    sending = info.get("kv_blocks", {}).get("sending", 0)
    num_requests = sum(info.get("requests", {}).values()) or int(sending > 0)
    streams = info.get("live_streams", {})
    routed, direct = streams.get("routed", 0), streams.get("direct", 0)
    num_moving = routed if streams.get("can_move") else 0
    # A stream that has ended in the engine may still have to be written to its client.
    return RemainingWork(max(num_requests, routed + direct), num_moving, routed + direct - num_moving)


def _streams(number: int) -> str:
    return f"{number} stream{'' if number == 1 else 's'}"
