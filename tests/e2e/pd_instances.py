"""A prefill and a decode instance for tests, as real processes on one machine, and what both must look like at rest."""

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from tests.e2e.server import Server
from tests.e2e.streams import Stream, run_streams

PATIENCE_S = 90.0
LOOK_S = 0.02
NUM_SLOTS = 16
NUM_BLOCKS = 512
EVERYTHING_IS_HANDED_OVER = ("--local-prefill-tokens", "0")
SMALL = ("--threads", "1", "--max-num-seqs", str(NUM_SLOTS))

T = TypeVar("T")


class Pair:
    """The prefill instance can be killed and started again at the same handoff address."""

    def __init__(
        self, *common: str, prefill: Sequence[str] = (), decode: Sequence[str] = EVERYTHING_IS_HANDED_OVER
    ) -> None:
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Bound and not listening: other programs do not get the port, and instances, which reuse addresses, do.
        self._reserved.bind(("127.0.0.1", 0))
        port = str(self._reserved.getsockname()[1])
        every = (*SMALL, "--num-kv-blocks", str(NUM_BLOCKS), *common)
        self._prefill_flags = (*every, "--role", "prefill", "--handoff-port", port, *prefill)
        self._decode_flags = (*every, "--role", "decode", "--prefill-peers", f"tcp://127.0.0.1:{port}", *decode)
        self._stopped: list[int] = []
        self.prefill, self.decode = self._start()

    def _start(self) -> list[Server]:
        """Both at the same time. If one cannot start, the other one is stopped."""
        with ThreadPoolExecutor(2) as starting:
            started = [starting.submit(Server, *flags) for flags in (self._prefill_flags, self._decode_flags)]
        if faults := [one.exception() for one in started if one.exception()]:
            for one in started:
                if not one.exception():
                    one.result().__exit__(None, None, None)
            self._reserved.close()
            raise AssertionError("a pair needs both instances") from faults[0]
        return [one.result() for one in started]

    @property
    def both(self) -> tuple[Server, Server]:
        return self.prefill, self.decode

    def start_prefill(self, *more: str) -> None:
        """Again, if it is dead or not."""
        self.prefill.__exit__(None, None, None)
        self.prefill = Server(*self._prefill_flags, *more)

    def start_decode(self) -> None:
        self.decode.__exit__(None, None, None)
        self.decode = Server(*self._decode_flags)

    def heal(self) -> None:
        """After a test that failed half way: the next one finds both alive."""
        self.resume()
        if not self.prefill.is_running:
            self.start_prefill()
        if not self.decode.is_running:
            self.start_decode()

    def pause(self, pids: list[int]) -> None:
        self._stopped += pids
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continues the stopped processes that still exist."""
        pids, self._stopped = self._stopped, []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def wait_until_at_rest(self) -> None:
        """Both sides hold nothing for anybody, and no file is left."""
        for server in self.both:
            wait_until_at_rest(server)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.resume()
        self.decode.__exit__(kind, fault, trace)
        self.prefill.__exit__(kind, fault, trace)
        self._reserved.close()


def kill_instance(server: Server) -> None:
    """All of its processes at once."""
    kill_all(server.pids())
    server.stop(signal.SIGKILL)


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for(look: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """Looks until there is something. An instance without an answer, or without a process of a kind, may have one soon."""
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        try:
            if found := look():
                return found
        except (OSError, HTTPException, LookupError, ValueError):
            pass
        time.sleep(LOOK_S)
    raise AssertionError(f"never seen: {what}")


def handovers(server: Server, side: str, state: str) -> float:
    return server.metrics().get(f'onward_pd_handoffs{{side="{side}",state="{state}"}}', 0.0)


def ended(server: Server, outcome: str, side: str = "decode") -> float:
    return server.metrics().get(f'onward_pd_handoffs_total{{outcome="{outcome}",side="{side}"}}', 0.0)


def backend_of(pair: Pair) -> str:
    return pair.decode.get("/info")["configuration"]["kv_backend"]


def num_steps(server: Server) -> float:
    return total(server, "onward_steps_total")


def total(server: Server, name: str) -> float:
    """Returns the sum of a counter over all its labels."""
    return sum(value for key, value in server.metrics().items() if key.split("{")[0] == name)


HELD = re.compile(r'onward_requests\{|onward_pd_handoffs\{|onward_pd_leases\{|onward_kv_blocks\{state="(?!free|cached)')


def held(server: Server) -> dict[str, Any]:
    """What an instance at rest must not have: requests, handoffs, leases, blocks in anybody's hands, taken slots."""
    metrics = server.metrics()
    found: dict[str, Any] = {key: value for key, value in metrics.items() if value and HELD.match(key)}
    info = server.get("/info")
    if not (info["engine"] or {}).get("worker_ready"):
        found["worker"] = "not ready"
    elif info["engine"]["free_slots"] != info["configuration"]["max_num_seqs"]:
        found["free_slots"] = info["engine"]["free_slots"]
    idle = metrics['onward_kv_blocks{state="free"}'] + metrics['onward_kv_blocks{state="cached"}']
    if idle != info["configuration"]["num_kv_blocks"]:
        found["idle_blocks"] = idle
    if files := server.leftovers():
        found["files"] = files
    return found


def wait_until_at_rest(server: Server) -> None:
    seen: list[dict[str, Any]] = [{"answer": "none"}]

    def nothing_is_held() -> bool:
        seen.append(held(server))
        return not seen[-1]

    try:
        wait_for(nothing_is_held, "rest")
    except AssertionError:
        raise AssertionError(f"still held: {seen[-1]}\n{server.log()}") from None


class OpenThings(NamedTuple):
    num_fds: int
    num_mappings: int
    """Mappings of memory that has no name in the file system."""


def open_things(pid: int) -> OpenThings:
    maps = Path(f"/proc/{pid}/maps").read_text()
    return OpenThings(len(list(Path(f"/proc/{pid}/fd").iterdir())), maps.count("/memfd:"))


def run_disturbed(url: str, bodies: list[dict[str, Any]], disturb: Callable[[], None]) -> list[Stream]:
    """Reads all streams to their end while `disturb` runs."""
    with ThreadPoolExecutor(1) as beside:
        disturbing = beside.submit(disturb)
        streams = run_streams(url, bodies)
        disturbing.result()
    return streams
