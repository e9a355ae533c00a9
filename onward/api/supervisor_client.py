"""An api process's conversation with its supervisor: who serves, what the whole instance looks like, when to leave."""

import asyncio
import itertools
from collections.abc import Callable

from onward.errors import RETRY_SOON_S, Unavailable
from onward.proto.control import (
    InstanceView,
    MetricsSnapshot,
    QueryInstance,
    QueryMetrics,
    RequestDrain,
    RequestUndrain,
    ToChild,
)
from onward.proto.stats import MetricFamily
from onward.transport.control_channel import SupervisorChannel

QUERY_TIMEOUT_S = 3.0


class SupervisorClient:
    def __init__(self, channel: SupervisorChannel, snapshot: Callable[[], list[MetricFamily]]) -> None:
        self._channel = channel
        self._snapshot = snapshot
        self._query_ids = itertools.count(1)
        self._queries: dict[int, asyncio.Future[InstanceView]] = {}

    def receive(self) -> ToChild | None:
        """The next message for others than this client. The channel raises when the supervisor has died."""
        while (message := self._channel.receive()) is not None:
            match message:
                case QueryMetrics():
                    self._channel.send(MetricsSnapshot(message.query_id, self._snapshot()))
                case InstanceView():
                    self._resolve_query(message)
                case _:
                    return message
        return None

    def request_drain(self) -> None:
        """For the whole instance: the supervisor tells every api process."""
        if not self._channel.send(RequestDrain()):
            raise Unavailable("the supervisor does not read", retry_after_s=RETRY_SOON_S)

    def request_undrain(self) -> None:
        if not self._channel.send(RequestUndrain()):
            raise Unavailable("the supervisor does not read", retry_after_s=RETRY_SOON_S)

    async def query_instance(self) -> InstanceView:
        """The whole instance, as of now."""
        query_id = next(self._query_ids)
        reply = self._queries[query_id] = asyncio.get_running_loop().create_future()
        try:
            if not self._channel.send(QueryInstance(query_id)):
                raise Unavailable("the supervisor does not read")
            return await asyncio.wait_for(reply, QUERY_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(f"the supervisor did not answer within {QUERY_TIMEOUT_S:g} s") from None
        finally:
            del self._queries[query_id]

    def _resolve_query(self, view: InstanceView) -> None:
        reply = self._queries.get(view.query_id)
        if reply is not None and not reply.done():
            reply.set_result(view)
