"""The ends of simulated wires. Received messages wait in a port until its process reads them."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from onward.proto.control import FromChild, ToChild
from onward.sim.process import SimProcess
from onward.sim.wire import SimContext, SimWire


class SimPort:
    def __init__(self, context: SimContext, process: SimProcess, wake: Callable[[], None]) -> None:
        """`wake` is called when a message has arrived."""
        self._context, self._process, self._wake = context, process, wake
        self._inbox: deque[Any] = deque()
        self._is_open = True

    def arrived(self, message: Any) -> None:
        if self._is_open:
            self._inbox.append(message)
            self._wake()

    def receive(self) -> Any | None:
        return self._inbox.popleft() if self._inbox else None

    def close(self) -> None:
        self._is_open = False

    @property
    def is_alive(self) -> bool:
        return self._is_open and not self._process.is_dead


class SimServerPort(SimPort):
    """A port for any number of clients. Each received message comes with the incarnation of its client."""

    def __init__(
        self,
        context: SimContext,
        process: SimProcess,
        wake: Callable[[], None],
        *,
        received: Any,
        sent: Any,
        name_suffix: str = "",
        may_reorder: bool = False,
    ) -> None:
        super().__init__(context, process, wake)
        self._received, self._sent, self._suffix, self._may_reorder = received, sent, name_suffix, may_reorder
        self._outgoing: dict[str, SimWire] = {}

    def connect(self, incarnation: str, client: SimProcess, deliver: Callable[[Any], None]) -> SimWire:
        """Returns the client's wire to this port. Messages from this port go to `deliver`."""

        def arrived(message: Any) -> None:
            self.arrived((incarnation, message))

        server = self._process
        to_client = f"{server}>{client}{self._suffix}"
        to_server = f"{client}>{server}{self._suffix}"
        self._outgoing[incarnation] = SimWire(
            self._context, to_client, server, client, deliver, self._sent, may_reorder=self._may_reorder
        )
        return SimWire(self._context, to_server, client, server, arrived, self._received, may_reorder=self._may_reorder)

    def send(self, receiver: str, message: Any) -> bool:
        wire = self._outgoing.get(receiver)
        if wire is not None:
            wire.send(message)
        return wire is not None


class SimWorkerPort(SimPort):
    """An engine's port for one worker. It receives all messages in order, unless the worker dies."""

    _to_worker: SimWire | None = None

    def connect(
        self, worker: SimProcess, deliver: Callable[[Any], None], sent: Any, *received: Any, name_suffix: str = ""
    ) -> list[SimWire]:
        """Returns the worker's wires to this port, one for each received type."""
        engine = self._process
        to_worker, to_engine = f"{engine}>{worker}{name_suffix}", f"{worker}>{engine}{name_suffix}"
        self._to_worker = SimWire(self._context, to_worker, engine, worker, deliver, sent, may_lose=False)
        return [
            SimWire(self._context, to_engine, worker, engine, self.arrived, message_type, may_lose=False)
            for message_type in received
        ]

    def send(self, message: Any) -> None:
        assert self._to_worker is not None, "it has said hello"
        self._to_worker.send(message)


class SimControlChannel(SimPort):
    """The socket pair between a simulated supervisor and one child: whole messages, in order, never lost. This is the
    child's end; the supervisor's is `send_to_child`."""

    def __init__(
        self,
        context: SimContext,
        supervisor: SimProcess,
        child: SimProcess,
        on_message: Callable[[FromChild], None],
        wake: Callable[[], None],
    ) -> None:
        super().__init__(context, child, wake)
        up, down = f"{child}>{supervisor}", f"{supervisor}>{child}"
        self._to_supervisor = SimWire(context, up, child, supervisor, on_message, FromChild, may_lose=False)
        self.send_to_child = SimWire(context, down, supervisor, child, self.arrived, ToChild, may_lose=False).send

    def fileno(self) -> int:
        return -1

    def send(self, message: Any, fds: Sequence[int] = ()) -> bool:
        self._to_supervisor.send(message)
        return True

    def take_fds(self) -> list[int]:
        return []
