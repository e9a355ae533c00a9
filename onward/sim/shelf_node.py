"""A shelf process in a simulation: the shipping `ShelfProcess` on simulated wires, woken by what arrives and by time."""

from collections import deque
from collections.abc import Callable

from onward.proto.control import FromChild
from onward.proto.shelf import FromShelf, ToShelf
from onward.shelf.core import ShelfCore
from onward.shelf.main import TICK_MS, ShelfProcess
from onward.sim.channel import ChildChannel
from onward.sim.process import Process
from onward.sim.wire import Ground, Wire

IDLE_TICK_S = 1.0
"""Nobody waits for an idle one; its own time need not be so fine."""


class ShelfPort:
    """What `transport.shelf.ShelfPort` is."""

    def __init__(self, ground: Ground, process: Process, wake: Callable[[], None]) -> None:
        self._ground, self._process, self._wake = ground, process, wake
        self._inbox: deque[tuple[str, ToShelf]] = deque()
        self._outgoing: dict[str, Wire] = {}

    def connect(self, incarnation: str, api: Process, deliver: Callable[[FromShelf], None]) -> Wire:
        """The api's way to us; what we say goes to `deliver`."""
        shelf = self._process
        self._outgoing[incarnation] = Wire(self._ground, f"{shelf}>{api}", shelf, api, deliver, FromShelf)

        def arrived(message: ToShelf) -> None:
            self._inbox.append((incarnation, message))
            self._wake()

        return Wire(self._ground, f"{api}>{shelf}", api, shelf, arrived, ToShelf)

    def receive(self) -> tuple[str, ToShelf] | None:
        return self._inbox.popleft() if self._inbox else None

    def send(self, receiver: str, message: FromShelf) -> bool:
        wire = self._outgoing.get(receiver)
        if wire is None:
            return False
        wire.send(message)
        return True


class ShelfNode:
    def __init__(
        self, ground: Ground, process: Process, supervisor: Process, heard: Callable[[FromChild], None]
    ) -> None:
        self.process = process
        self.incarnation = f"shelf-{process.name}"
        self._turn_is_due = False
        self.channel = ChildChannel(ground, supervisor, process, heard, self._wake)
        self.port = ShelfPort(ground, process, self._wake)
        self._shelf = ShelfProcess(self.channel, self.port, process)
        self._tick()

    @property
    def core(self) -> ShelfCore:
        return self._shelf.core

    def _tick(self) -> None:
        self._wake()
        self.process.later(TICK_MS / 1000 if self.core.num_questions else IDLE_TICK_S, self._tick)

    def _wake(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            self.process.soon(self._turn)

    def _turn(self) -> None:
        self._turn_is_due = False
        self._shelf.turn()
