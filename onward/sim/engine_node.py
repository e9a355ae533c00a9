"""An engine process in a simulation: the shipping `EngineProcess` on simulated wires, woken by what arrives and by time."""

from collections.abc import Callable
from typing import Any, cast

from onward.engine.core import EngineCore
from onward.engine.main import TICK_MS, EngineProcess
from onward.proto.control import FromChild, StartEngine
from onward.proto.step import StepPlan
from onward.sim.control_channel import SimControlChannel
from onward.sim.engine_wires import SimAddresses, SimEngineWires
from onward.sim.process import SimProcess
from onward.sim.wire import SimContext

IDLE_TICK_S = 0.5
"""An idle engine is woken by what arrives; its own time need not be so fine."""


class EngineNode:
    def __init__(
        self,
        context: SimContext,
        addresses: SimAddresses,
        process: SimProcess,
        supervisor: SimProcess,
        start: StartEngine,
        on_message: Callable[[FromChild], None],
        handoff_address: str,
        after_turn: Callable[["EngineNode"], None],
        watch_plan: Callable[[StepPlan], None],
    ) -> None:
        self.process, self.incarnation = process, start.incarnation
        self._after_turn = after_turn
        self._wake = process.coalesced(self._turn)
        self.channel = SimControlChannel(context, supervisor, process, on_message, self._wake)
        wires = SimEngineWires(context, addresses, process, self._wake, watch_plan, handoff_address)
        # The heap is not frozen: it has all engines of this run and garbage of earlier runs, which would stay forever.
        self._engine = EngineProcess(
            start, cast(Any, self.channel), cast(Any, wires), process, before_ready=lambda: None
        )
        self._tick()

    @property
    def core(self) -> EngineCore | None:
        return self._engine.core

    def _tick(self) -> None:
        self._wake()
        is_idle = self.core is None or self.core.idle
        self.process.call_later(IDLE_TICK_S if is_idle else TICK_MS / 1000, self._tick)

    def _turn(self) -> None:
        if self._engine.is_stopped:
            self.process.kill()  # as the real process exits
            return
        self._engine.run_once()
        self._after_turn(self)
