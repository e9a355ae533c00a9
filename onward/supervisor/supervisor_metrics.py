"""What the supervisor itself counts: restarts, out-of-memory kills, deaths of ranks, and reports that it could not use.

The metrics of its children are in `snapshots`.
"""

import logging
from collections.abc import Callable, Mapping

from onward import log
from onward.obs.build_info import register_build_info
from onward.obs.metrics import Registry
from onward.obs.process_usage import ProcessUsage
from onward.proto.stats import MetricFamily
from onward.supervisor.children import ProcessRole
from onward.supervisor.oom import OomEvidence

logger = logging.getLogger(__name__)


class SupervisorMetrics:
    def __init__(
        self, *, num_ranks: int, count_ranks: Callable[[], int], restarts: Callable[[], Mapping[ProcessRole, int]]
    ) -> None:
        """`num_ranks`: how many ranks the worker is meant to have. `count_ranks` returns how many it has now."""
        self.usage = ProcessUsage()
        self._registry = Registry()
        self._oom_kills = self._registry.counter(
            "onward_oom_kills_total", "processes that the kernel killed for lack of memory", ["process", "evidence"]
        )
        for role in ProcessRole:  # a rate needs a first sample before the first event
            for evidence in OomEvidence:
                self._oom_kills.inc(role.value, evidence.name.lower(), by=0)
        self._unusable = self._registry.counter(
            "onward_metrics_unusable_total", "Series left out of /metrics because a value is not finite", ["process"]
        )
        self._unusable_names: set[tuple[ProcessRole, str]] = set()
        self.messages_dropped = self._registry.counter(
            "onward_control_messages_dropped_total", "messages of children that could not be decoded", ["process"]
        )
        self.rank_deaths = self._registry.counter(
            "onward_rank_deaths_total", "workers and standbys that ended because this rank died by itself", ["rank"]
        )
        if num_ranks > 1:
            for rank in range(num_ranks):
                self.rank_deaths.inc(str(rank), by=0)
        self._registry.gauge("onward_worker_ranks", "ranks of the worker", [], lambda: {(): float(count_ranks())})
        self._registry.derived_counter(
            "onward_process_restarts_total",
            "processes that were started again after a death, by process",
            ["process"],
            lambda: {(role.value,): count for role, count in restarts().items()},
        )
        register_build_info(self._registry)
        self.usage.register(self._registry)

    def snapshot(self) -> list[MetricFamily]:
        return self._registry.snapshot()

    def count_unusable(self, role: ProcessRole, names: list[str]) -> None:
        """Counts series that are left out. Logs each metric only once, because snapshots come every second."""
        for name in names:
            self._unusable.inc(role.value)
            if (role, name) not in self._unusable_names:
                self._unusable_names.add((role, name))
                logger.error(
                    log.event("metric left out because its value is not a finite number", role=role.value, metric=name)
                )

    def count_oom_kill(self, role: ProcessRole, evidence: OomEvidence) -> None:
        self._oom_kills.inc(role.value, evidence.name.lower())

    def oom_kills_by_role(self) -> dict[str, int]:
        kinds = [evidence.name.lower() for evidence in OomEvidence]
        return {role.value: int(sum(self._oom_kills.value(role.value, kind) for kind in kinds)) for role in ProcessRole}
