"""A stream store process in a simulation: the shipping `StreamStoreProcess` on simulated wires, woken by what
arrives and by time."""

from collections.abc import Callable

from onward.proto.control import FromChild
from onward.proto.stream_store import FromStreamStore, ToStreamStore
from onward.sim.control_channel import SimControlChannel
from onward.sim.ports import SimServerPort
from onward.sim.process import SimProcess
from onward.sim.wire import SimContext
from onward.stream_store.main import TICK_MS, StreamStoreProcess
from onward.stream_store.store_core import StreamStoreCore

IDLE_TICK_S = 1.0
"""Nobody waits for an idle one; its own time need not be so fine."""


class StreamStoreNode:
    def __init__(
        self, context: SimContext, process: SimProcess, supervisor: SimProcess, on_message: Callable[[FromChild], None]
    ) -> None:
        self.process = process
        self.incarnation = f"shelf-{process.name}"
        self._wake = process.coalesced(self._turn)
        self.channel = SimControlChannel(context, supervisor, process, on_message, self._wake)
        self.port = SimServerPort(context, process, self._wake, received=ToStreamStore, sent=FromStreamStore)
        self._stream_store = StreamStoreProcess(self.channel, self.port, process)
        self._tick()

    @property
    def core(self) -> StreamStoreCore:
        return self._stream_store.core

    def _tick(self) -> None:
        self._wake()
        self.process.call_later(TICK_MS / 1000 if self.core.num_pending_queries else IDLE_TICK_S, self._tick)

    def _turn(self) -> None:
        self._stream_store.run_once()
        if self._stream_store.is_stopped:
            self.process.kill()
