"""A stream store process in a simulation: the shipping `StreamStoreProcess` on simulated wires, woken by what
arrives and by time."""

from collections import deque
from collections.abc import Callable

from onward.proto.control import FromChild
from onward.proto.stream_store import FromStreamStore, ToStreamStore
from onward.sim.control_channel import SimControlChannel
from onward.sim.process import SimProcess
from onward.sim.wire import SimContext, SimWire
from onward.stream_store.main import TICK_MS, StreamStoreProcess
from onward.stream_store.store_core import StreamStoreCore

IDLE_TICK_S = 1.0
"""Nobody waits for an idle one; its own time need not be so fine."""


class SimStreamStorePort:
    """What `transport.stream_store_sockets.StreamStoreServerSocket` is."""

    def __init__(self, context: SimContext, process: SimProcess, wake: Callable[[], None]) -> None:
        self._context, self._process, self._wake = context, process, wake
        self._inbox: deque[tuple[str, ToStreamStore]] = deque()
        self._outgoing: dict[str, SimWire] = {}

    def connect(self, incarnation: str, api: SimProcess, deliver: Callable[[FromStreamStore], None]) -> SimWire:
        """The api's way to us; what we say goes to `deliver`."""
        process = self._process
        self._outgoing[incarnation] = SimWire(self._context, f"{process}>{api}", process, api, deliver, FromStreamStore)

        def arrived(message: ToStreamStore) -> None:
            self._inbox.append((incarnation, message))
            self._wake()

        return SimWire(self._context, f"{api}>{process}", api, process, arrived, ToStreamStore)

    def receive(self) -> tuple[str, ToStreamStore] | None:
        return self._inbox.popleft() if self._inbox else None

    def send(self, receiver: str, message: FromStreamStore) -> bool:
        wire = self._outgoing.get(receiver)
        if wire is None:
            return False
        wire.send(message)
        return True


class StreamStoreNode:
    def __init__(
        self, context: SimContext, process: SimProcess, supervisor: SimProcess, on_message: Callable[[FromChild], None]
    ) -> None:
        self.process = process
        self.incarnation = f"shelf-{process.name}"
        self._turn_is_due = False
        self.channel = SimControlChannel(context, supervisor, process, on_message, self._wake)
        self.port = SimStreamStorePort(context, process, self._wake)
        self._stream_store = StreamStoreProcess(self.channel, self.port, process)
        self._tick()

    @property
    def core(self) -> StreamStoreCore:
        return self._stream_store.core

    def _tick(self) -> None:
        self._wake()
        self.process.call_later(TICK_MS / 1000 if self.core.num_pending_queries else IDLE_TICK_S, self._tick)

    def _wake(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            self.process.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_is_due = False
        self._stream_store.run_once()
        if self._stream_store.is_stopped:
            self.process.kill()
