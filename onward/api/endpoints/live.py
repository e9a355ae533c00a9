"""The live view of one instance: processes, slots, blocks and requests at one moment."""

import msgspec

from onward.api.endpoints.admin import instance_state
from onward.api.engine_link.engine_client import EngineClient
from onward.api.lifecycle.stream_registry import StreamRegistry
from onward.api.supervisor_client import SupervisorClient
from onward.clock import Clock
from onward.config import ApiConfig
from onward.proto.control import LiveView


class InstanceLiveView:
    """Builds the JSON snapshot of one instance that /ui and `onward top` show."""

    def __init__(
        self,
        config: ApiConfig,
        model: str,
        client: EngineClient,
        supervisor: SupervisorClient,
        streams: StreamRegistry,
        clock: Clock,
    ) -> None:
        self._config, self._model, self._client, self._supervisor = config, model, client, supervisor
        self._streams, self._clock = streams, clock

    async def look(self) -> bytes:
        """Returns the snapshot as JSON, in the same form as a router: a list of instances, here with one entry."""
        view = await self._supervisor.query_live()
        return msgspec.json.encode(
            {"at_s": self._clock.now_s(), "role": "instance", "instances": [self._describe(view)]}
        )

    def _describe(self, view: LiveView) -> dict[str, object]:
        engine = view.engine
        is_serving = engine is not None and engine.worker_ready
        return {
            "id": view.incarnation,
            "role": self._config.role,
            "model": self._model,
            "state": instance_state(self._client, self._streams, is_serving),
            "processes": view.processes,
            "restarts": view.restarts,
            "engine": engine,
        }
