"""An api process's client of its supervisor: receives control messages, queries the instance, requests drains."""

import asyncio
import itertools
from collections.abc import Callable
from typing import TypeVar

from onward.errors import RETRY_SOON_S, Unavailable
from onward.proto.control import (
    InstanceView,
    LiveView,
    MetricsSnapshot,
    QueryInstance,
    QueryMetrics,
    RequestDrain,
    RequestUndrain,
    ToChild,
)
from onward.proto.demo import KillTarget, RequestKill
from onward.proto.live import QueryLive
from onward.proto.stats import MetricFamily
from onward.transport.control_channel import SupervisorChannel

QUERY_TIMEOUT_S = 3.0

_View = TypeVar("_View", InstanceView, LiveView)


class SupervisorClient:
    def __init__(self, channel: SupervisorChannel, snapshot: Callable[[], list[MetricFamily]]) -> None:
        self._channel = channel
        self._snapshot = snapshot
        self._query_ids = itertools.count(1)
        self._queries: dict[int, asyncio.Future[InstanceView]] = {}
        self._live_queries: dict[int, asyncio.Future[LiveView]] = {}

    def receive(self) -> ToChild | None:
        """Returns the next message that this client does not handle itself, or None. Raises `ChannelClosed` when the
        supervisor has died."""
        while (message := self._channel.receive()) is not None:
            match message:
                case QueryMetrics():
                    self._channel.send(MetricsSnapshot(message.query_id, self._snapshot()))
                case InstanceView():
                    _resolve(self._queries, message.query_id, message)
                case LiveView():
                    _resolve(self._live_queries, message.query_id, message)
                case _:
                    return message
        return None

    def request_drain(self) -> None:
        """Asks the supervisor to drain the whole instance; the supervisor informs every api process. Raises
        `Unavailable` if the supervisor does not read its messages."""
        if not self._channel.send(RequestDrain()):
            raise Unavailable("the supervisor does not read", retry_after_s=RETRY_SOON_S)

    def request_undrain(self) -> None:
        if not self._channel.send(RequestUndrain()):
            raise Unavailable("the supervisor does not read", retry_after_s=RETRY_SOON_S)

    def request_kill(self, target: KillTarget) -> None:
        if not self._channel.send(RequestKill(target)):
            raise Unavailable("the supervisor does not read", retry_after_s=RETRY_SOON_S)

    async def query_instance(self) -> InstanceView:
        """Returns the current view of the whole instance."""
        return await self._ask(QueryInstance(next(self._query_ids)), self._queries)

    async def query_live(self) -> LiveView:
        """Returns the current activity of the processes and the engine, for the live view."""
        return await self._ask(QueryLive(next(self._query_ids)), self._live_queries)

    async def _ask(self, query: QueryInstance | QueryLive, queries: dict[int, asyncio.Future[_View]]) -> _View:
        reply = queries[query.query_id] = asyncio.get_running_loop().create_future()
        try:
            if not self._channel.send(query):
                raise Unavailable("the supervisor does not read")
            return await asyncio.wait_for(reply, QUERY_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(f"the supervisor did not answer within {QUERY_TIMEOUT_S:g} s") from None
        finally:
            del queries[query.query_id]


def _resolve(queries: dict[int, asyncio.Future[_View]], query_id: int, view: _View) -> None:
    reply = queries.get(query_id)
    if reply is not None and not reply.done():
        reply.set_result(view)
