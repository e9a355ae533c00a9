"""The socket pair between a simulated supervisor and one child: whole messages, in order, never lost."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from onward.proto.control import FromChild, ToChild
from onward.sim.process import SimProcess
from onward.sim.wire import SimContext, SimWire


class SimControlChannel:
    """The child's end. The supervisor's end is `send_to_child`."""

    def __init__(
        self,
        context: SimContext,
        supervisor: SimProcess,
        child: SimProcess,
        on_message: Callable[[FromChild], None],
        wake: Callable[[], None],
    ) -> None:
        self._inbox: deque[ToChild] = deque()
        self._wake = wake
        up, down = f"{child}>{supervisor}", f"{supervisor}>{child}"
        self._to_supervisor = SimWire(context, up, child, supervisor, on_message, FromChild, may_lose=False)
        self.send_to_child = SimWire(context, down, supervisor, child, self._on_message, ToChild, may_lose=False).send

    def _on_message(self, message: ToChild) -> None:
        self._inbox.append(message)
        self._wake()

    def fileno(self) -> int:
        return -1

    def send(self, message: Any, fds: Sequence[int] = ()) -> bool:
        self._to_supervisor.send(message)
        return True

    def receive(self) -> ToChild | None:
        return self._inbox.popleft() if self._inbox else None

    def take_fds(self) -> list[int]:
        return []
