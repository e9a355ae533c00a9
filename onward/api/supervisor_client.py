"""An api process's conversation with its supervisor: who serves, what the whole instance looks like, when to leave."""

import asyncio
import itertools
from collections.abc import Callable

from onward.api.engine_link.engine_client import EngineClient
from onward.api.lifecycle.stream_store_client import StreamStoreClient
from onward.errors import RETRY_SOON_S, Unavailable
from onward.proto.control import (
    Drain,
    EngineGone,
    EngineUp,
    InstanceView,
    MetricsSnapshot,
    QueryInstance,
    QueryMetrics,
    RequestDrain,
    RequestUndrain,
    StopChild,
    StreamStoreGone,
    StreamStoreUp,
    Undrain,
    UpdateApiKeys,
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

    def dispatch_messages(
        self,
        engine_client: EngineClient,
        stream_store: StreamStoreClient,
        drain: Callable[[], None],
        undrain: Callable[[], None],
        stop: Callable[[float], None],
        update_keys: Callable[[UpdateApiKeys], None],
    ) -> None:
        """Acts on every message that is there. The channel raises when the supervisor has died."""
        while (message := self._channel.receive()) is not None:
            match message:
                case EngineUp():
                    engine_client.engine_up(message)
                case EngineGone():
                    engine_client.engine_gone(message)
                case StreamStoreUp():
                    stream_store.store_up(message)
                case StreamStoreGone():
                    stream_store.store_gone(message)
                case QueryMetrics():
                    self._channel.send(MetricsSnapshot(message.query_id, self._snapshot()))
                case InstanceView():
                    self._resolve_query(message)
                case Drain():
                    drain()
                case Undrain():
                    undrain()
                case UpdateApiKeys():
                    update_keys(message)
                case StopChild():
                    stop(message.grace_s)
                case _:
                    raise AssertionError(f"not a message for an api process: {type(message).__name__}")

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
