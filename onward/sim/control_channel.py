"""The socket pair between a simulated supervisor and one child: whole messages, in order, never lost."""

from collections.abc import Callable, Sequence
from typing import Any

from onward.proto.control import FromChild, ToChild
from onward.sim.ports import SimPort
from onward.sim.process import SimProcess
from onward.sim.wire import SimContext, SimWire


class SimControlChannel(SimPort):
    """The child's end. The supervisor's end is `send_to_child`."""

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
