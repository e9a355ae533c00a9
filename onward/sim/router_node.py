"""A router process in a simulation: the shipping router, with a simulated way to its instances."""

from functools import partial
from typing import Any, cast

from onward.config import RouterConfig
from onward.router.router import Router
from onward.sim.http import SimHttpNetwork, SimHttpSession, url_of
from onward.sim.process import SimProcess
from onward.web.auth.api_key_table import ApiKeyTable


class RouterNode:
    """Keeps an address; the process behind it may die and come again."""

    def __init__(
        self, network: SimHttpNetwork, name: str, config: RouterConfig, keys: ApiKeyTable, cluster_key: str
    ) -> None:
        self.url = url_of(name)
        self._network, self._name, self._config = network, name, config
        self._keys, self._cluster_key = keys, cluster_key
        self._num_starts = 0
        self._wall_offset_s = 0.0
        self._listener = network.listen(self.url, name, waits=False)
        self.start()

    def start(self) -> None:
        self._num_starts += 1
        process = self.process = SimProcess(self._network.context.loop, f"{self._name}.{self._num_starts}")
        process.wall_offset_s = self._wall_offset_s
        random = self._network.context.random.substream(process.name)
        session = SimHttpSession(self._network, process)
        router = partial(Router, self._config, self._cluster_key, keys=self._keys)
        self.router = process.run(router, process, random, cast(Any, session), session.post_attempt)
        process.start(self.router.stream_runner.run_maintenance())
        self._listener.serve(process, self.router.app)

    def set_clock(self, offset_s: float) -> None:
        """Its machine's wall clock, for lives to come too."""
        self._wall_offset_s = self.process.wall_offset_s = offset_s

    def kill(self) -> None:
        self._network.context.trace.note(f"{self.process} dies")
        self.process.kill()

    @property
    def is_up(self) -> bool:
        return not self.process.is_dead

    def processes(self, role: str) -> list[SimProcess]:
        return [self.process] if role == "router" and self.is_up else []

    def start_again(self) -> None:
        if self.process.is_dead:
            self.start()
