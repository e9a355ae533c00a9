"""The socket pair between a simulated supervisor and one child: whole messages, in order, never lost."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from onward.proto.control import FromChild, ToChild
from onward.sim.process import SimProcess
from onward.sim.wire import SimContext, SimWire


class SimControlChannel:
    """The child's end. The supervisor's is `tell`."""

    def __init__(
        self,
        ground: SimContext,
        supervisor: SimProcess,
        child: SimProcess,
        heard: Callable[[FromChild], None],
        wake: Callable[[], None],
    ) -> None:
        self._inbox: deque[ToChild] = deque()
        self._wake = wake
        up, down = f"{child}>{supervisor}", f"{supervisor}>{child}"
        self._up = SimWire(ground, up, child, supervisor, heard, FromChild, may_lose=False)
        self.tell = SimWire(ground, down, supervisor, child, self._arrived, ToChild, may_lose=False).send

    def _arrived(self, message: ToChild) -> None:
        self._inbox.append(message)
        self._wake()

    def fileno(self) -> int:
        return -1

    def send(self, message: Any, fds: Sequence[int] = ()) -> bool:
        self._up.send(message)
        return True

    def receive(self) -> ToChild | None:
        return self._inbox.popleft() if self._inbox else None

    def take_fds(self) -> list[int]:
        return []
