"""An api process in a simulation: the shipping `Api` with a simulated sockets, server and supervisor."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Protocol, cast

from onward.api.process import Api, Rim
from onward.api.prompts import Prompts
from onward.proto.control import FromChild, StartApi
from onward.sim.channel import ChildChannel
from onward.sim.engine_wires import Addresses
from onward.sim.http import Listener, Session, Web
from onward.sim.process import Process
from onward.sim.wire import Wire


class Inline(Executor):
    """Threads would not be repeatable."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as fault:
            future.set_exception(fault)
        return future


class Port(Protocol):
    """Of an engine or a shelf."""

    def connect(self, incarnation: str, api: Process, deliver: Callable[[Any], None]) -> Wire: ...


class Socket:
    """What `transport.zmq.EngineSocket` and `transport.shelf.ShelfSocket` are, over simulated wires."""

    def __init__(self, port: Port | None, api: Process, incarnation: str) -> None:
        self._inbox: deque[Any] = deque()
        self._news = asyncio.Event()
        self._wire = port.connect(incarnation, api, self._arrived) if port is not None else None

    def _arrived(self, message: Any) -> None:
        self._inbox.append(message)
        self._news.set()

    def send(self, message: Any) -> bool:
        if self._wire is not None:
            self._wire.send(message)
        return True

    async def receive(self) -> Any:
        while not self._inbox:
            self._news.clear()
            await self._news.wait()
        return self._inbox.popleft()

    def close(self) -> None:
        self._wire = None


class ApiNode:
    def __init__(
        self,
        web: Web,
        addresses: Addresses,
        process: Process,
        supervisor: Process,
        start: StartApi,
        prompts: Prompts,
        listener: Listener,
        heard: Callable[[FromChild], None],
    ) -> None:
        self.process, self.incarnation, self.index = process, start.incarnation, start.index
        self._listener = listener
        self._control_is_due = False
        self.channel = ChildChannel(web.ground, supervisor, process, heard, self._control_later)
        rim = Rim(
            clock=process,
            chance=web.ground.chance.of(process.name),
            connect=lambda address: Socket(addresses.apis.get(address), process, start.incarnation),
            connect_shelf=lambda address: Socket(addresses.shelves.get(address), process, start.incarnation),
            new_session=lambda: cast(Any, Session(web, process)),
            new_threads=lambda num, name: Inline(),
            stop_server=self._stop,
            leave_at_once=process.kill,
        )
        self.api = process.run(Api, start, cast(Any, self.channel), prompts, rim)
        listener.serve(process, self.api.app)
        process.run(self.api.started)

    def _control_later(self) -> None:
        if not self._control_is_due:
            self._control_is_due = True
            self.process.soon(self._read_control)

    def _read_control(self) -> None:
        self._control_is_due = False
        self.api.read_control()

    def _stop(self, grace_s: float, at_its_end: Callable[[], object]) -> None:
        """As a server does: no new connections, and the end when the grace is over."""
        self._listener.close(self.process)
        self.process.later(grace_s, at_its_end)
        self.process.later(grace_s + 1.0, self.process.kill)
