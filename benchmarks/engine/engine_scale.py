"""What one event costs an engine that holds many requests: `python -m benchmarks.engine.engine_scale`.

CPU time per event, beside the number of requests that are live already. The cost of an event must not grow with it.
There is no worker and no socket: the engine core takes messages and returns messages.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.table import Table

from onward.config import EngineConfig
from onward.engine.core import EngineCore
from onward.obs.tables import print_table
from onward.proto import SCHEMA_VERSION
from onward.proto.engine import CallerLimits, Submit
from onward.proto.kv_transfer import KvEndpoint, KvLayout
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import WorkerHello

SIZES = (250, 1000, 4000)
_PROMPT = list(range(1, 17))
_EVENTS = 200
_ROUNDS = 5
_TURN_S = 0.05


class EngineLoad(Protocol):
    def event(self) -> None: ...


class _LoadedEngine:
    def __init__(self, config: EngineConfig, *, with_peers: bool = False) -> None:
        hello = WorkerHello(
            SCHEMA_VERSION,
            "worker",
            "engine",
            0,
            "none",
            num_blocks=64,
            block_size=16,
            max_model_len=4096,
            vocab_size=1000,
            kv_layout=KvLayout("none", "int64", 16, 1, 1, 1) if with_peers else None,
            kv_endpoint=KvEndpoint("none", "unix:@none", "worker") if with_peers else None,
        )
        self.core = EngineCore(config, "engine", hello)
        self.now_s = 0.0
        self._seq = 0

    def submit(self, limits: CallerLimits | None = None) -> None:
        self._seq += 1
        sampling = SamplingParams(seed=0, max_tokens=8)
        message = Submit(
            self._seq, f"r{self._seq}-0", 1, list(_PROMPT), sampling, caller="caller", caller_limits=limits
        )
        self.core.receive_from_api("api", message, self.now_s)


class RefusedSubmissions(_LoadedEngine):
    """Submissions of a caller that has as many requests in flight as it may."""

    def __init__(self, num_live: int) -> None:
        super().__init__(EngineConfig(max_queue=1 << 20, max_queue_tokens=1 << 30))
        self._limits = CallerLimits(num_live, 1 << 40)
        for _ in range(num_live):
            self.submit(self._limits)
        self.core.take_api_messages()

    def event(self) -> None:
        self.submit(self._limits)
        self.core.take_api_messages()


class UnreachablePeer(_LoadedEngine):
    """Turns of a decode instance with prompts for a prefill instance that no message can be sent to. The peer is never away
    for long enough to be given up."""

    def __init__(self, num_live: int) -> None:
        config = EngineConfig(
            role="decode",
            prefill_peers=("peer",),
            local_prefill=False,
            local_prefill_tokens=0,
            handoff_timeout_s=1e9,
            lease_s=1e9,
            max_queue=1 << 20,
            max_queue_tokens=1 << 30,
        )
        super().__init__(config, with_peers=True)
        for _ in range(num_live):
            self.submit()
        self.event()

    def event(self) -> None:
        self.now_s += _TURN_S / 10
        self.core.plan(self.now_s)
        self.core.tick(self.now_s)
        self.core.take_api_messages()
        for peer, _ in self.core.take_handoff_messages().to_prefill:
            self.core.on_peer_send(peer, False, self.now_s)


class PeerAway(UnreachablePeer):
    """The same, once the peer has been given up: the prompts wait until it is back."""

    def __init__(self, num_live: int) -> None:
        super().__init__(num_live)
        for _ in range(20):
            self.now_s += _TURN_S
            self.event()


LOADS: dict[str, Callable[[int], EngineLoad]] = {
    "submission refused by a caller's limit": RefusedSubmissions,
    "turn with prompts at an unreachable peer": UnreachablePeer,
    "turn with prompts that wait for a peer": PeerAway,
}


def cost_us(load: EngineLoad, num_events: int = _EVENTS, rounds: int = _ROUNDS) -> float:
    """The median over the rounds."""
    costs: list[float] = []
    for _ in range(rounds):
        began_s = time.process_time()
        for _ in range(num_events):
            load.event()
        costs.append((time.process_time() - began_s) / num_events * 1e6)
    return statistics.median(costs)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.engine_scale", description=__doc__)
    parser.add_argument("--events", type=int, default=_EVENTS, help=f"of each measurement [{_EVENTS}]")
    events = parser.parse_args().events
    table = Table("CPU µs per event", *(f"{size:,} live" for size in SIZES))
    for name, load in LOADS.items():
        table.add_row(name, *(f"{cost_us(load(size), events):.1f}" for size in SIZES))
    print_table(Console(), table)


if __name__ == "__main__":
    main()
