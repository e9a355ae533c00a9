"""An api process in a simulation: the shipping `ApiProcess` with a simulated sockets, server and supervisor."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, cast

from onward.api.process import ApiProcess, Runtime
from onward.api.requests.text_processor import TextProcessor
from onward.proto.control import FromChild, StartApi
from onward.sim.control_channel import SimControlChannel
from onward.sim.engine_wires import SimAddresses
from onward.sim.http import SimHttpNetwork, SimHttpSession, SimListener
from onward.sim.ports import SimServerPort
from onward.sim.process import SimProcess


class InlineExecutor(Executor):
    """Threads would not be repeatable."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as fault:
            future.set_exception(fault)
        return future


class SimSocket:
    """What `transport.zmq_sockets.EngineClientSocket` and `transport.stream_store_sockets.StreamStoreClientSocket` are,
    over simulated wires."""

    def __init__(self, server: SimServerPort | None, api: SimProcess, incarnation: str) -> None:
        self._inbox: deque[Any] = deque()
        self._arrived = asyncio.Event()
        self._wire = server.connect(incarnation, api, self._on_message) if server is not None else None

    def _on_message(self, message: Any) -> None:
        self._inbox.append(message)
        self._arrived.set()

    def send(self, message: Any) -> bool:
        if self._wire is not None:
            self._wire.send(message)
        return True

    async def receive(self) -> Any:
        while not self._inbox:
            self._arrived.clear()
            await self._arrived.wait()
        return self._inbox.popleft()

    def close(self) -> None:
        self._wire = None


class ApiNode:
    def __init__(
        self,
        network: SimHttpNetwork,
        addresses: SimAddresses,
        process: SimProcess,
        supervisor: SimProcess,
        start: StartApi,
        prompts: TextProcessor,
        listener: SimListener,
        on_message: Callable[[FromChild], None],
    ) -> None:
        self.process, self.incarnation, self.index = process, start.incarnation, start.index
        self._listener = listener
        read_control = process.coalesced(lambda: self.api.read_control())
        self.channel = SimControlChannel(network.context, supervisor, process, on_message, read_control)
        runtime = Runtime(
            clock=process,
            random=network.context.random.substream(process.name),
            connect_engine=lambda address: SimSocket(addresses.apis.get(address), process, start.incarnation),
            connect_stream_store=lambda address: SimSocket(
                addresses.stream_stores.get(address), process, start.incarnation
            ),
            new_session=lambda: cast(Any, SimHttpSession(network, process)),
            new_executor=lambda num_threads, name: InlineExecutor(),
            stop_server=self._stop,
            exit_now=process.kill,
        )
        self.api = process.run(ApiProcess, start, cast(Any, self.channel), prompts, runtime)
        listener.serve(process, self.api.app)
        process.run(self.api.on_listening)

    def _stop(self, grace_s: float, on_end: Callable[[], object]) -> None:
        """As a server does: no new connections, and the end when the grace is over."""
        self._listener.close(self.process)
        self.process.call_later(grace_s, on_end)
        self.process.call_later(grace_s + 1.0, self.process.kill)
