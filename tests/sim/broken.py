"""A deliberate bug for tests of what happens when a simulation finds one: needs one kind of fault, and one request."""

import pytest

from onward.engine.core import EngineCore
from onward.sim.scenario import FaultSpec, Scenario, SimInstanceSpec, SimRequest

MARKED = 7
"""The priority of requests that it hits."""


def break_restarts(monkeypatch: pytest.MonkeyPatch, priority: int = MARKED) -> None:
    """When a worker dies, the last token of its requests of this priority becomes another one."""
    original = EngineCore.on_worker_lost

    def lose(self: EngineCore, now_s: float, *, keeps_memory: bool = False) -> None:
        for request in self.scheduler.running:
            if request.priority == priority and request.num_generated:
                request.token_ids[-1] ^= 1
        original(self, now_s, keeps_memory=keeps_memory)

    monkeypatch.setattr(EngineCore, "on_worker_lost", lose)


def crowded() -> Scenario:
    """Eight faults and ten requests; one of each matters."""
    asks = [
        SimRequest(
            f"q{index}",
            2.0 + index / 10,
            prompt=f"the sea {index} café",
            max_tokens=30,
            ignore_eos=True,
            n=1 + index % 2,
            temperature=1.0,
            seed=index,
            stop=["🌊🌊🌊"],
            wants_usage=True,
            priority=MARKED if index == 6 else 0,
        )
        for index in range(10)
    ]
    faults = [
        FaultSpec("lose", "api", 2.5, duration_s=0.5, rate=0.1),
        FaultSpec("delay", "engine", 2.2, duration_s=0.2, rate=0.1),
        FaultSpec("repeat", "api", 3.0, duration_s=0.5, rate=0.3),
        FaultSpec("cut", "http", 3.6, duration_s=0.5, rate=0.1),
        FaultSpec("kill-worker", "m0", 3.43, duration_s=0.5),
        FaultSpec("refuse", "http", 4.0, duration_s=0.5, rate=0.3),
        FaultSpec("lose", "api", 4.5, duration_s=0.5, rate=0.1),
        FaultSpec("stop-api", "m0", 5.0, duration_s=0.3),
    ]
    machine = SimInstanceSpec("m0", num_blocks=200, max_num_seqs=16, num_api_processes=2, clock_rate=1.05)
    return Scenario(1, "engine", [machine], asks, faults, delay_s=0.001)
