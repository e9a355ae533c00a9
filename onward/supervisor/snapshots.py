"""Aggregates the snapshots of all processes into one view of the instance, the same for every api process that asks.

Snapshots are requested once a second and at each query. The counters of dead processes are kept, so a restart never
makes a counter go back.
"""

from dataclasses import dataclass, field

from onward.obs.metrics import merge, without_gauges
from onward.proto.control import MetricsSnapshot
from onward.proto.stats import EngineStats, MetricFamily
from onward.supervisor.children import Child, ProcessRole

SNAPSHOT_TIMEOUT_S = 1.0


@dataclass(slots=True)
class SnapshotQuery:
    """A query of an api process for the view of the instance, and the children that have not answered yet."""

    requester: Child
    query_id: int
    deadline_at_s: float
    pending: set[Child]


@dataclass(slots=True)
class SnapshotAggregator:
    latest: dict[Child, MetricsSnapshot] = field(default_factory=dict)
    queries: dict[int, SnapshotQuery] = field(default_factory=dict)
    dead_process_families: list[MetricFamily] = field(default_factory=list)
    num_progress_reports: int = 0
    """Grows whenever an engine reports that it has completed further steps."""
    _next_query_id: int = 1

    def open_query(self, child: Child, query_id: int, pending: set[Child], now_s: float) -> int:
        own_query_id = self.next_query_id()
        self.queries[own_query_id] = SnapshotQuery(child, query_id, now_s + SNAPSHOT_TIMEOUT_S, pending)
        return own_query_id

    def next_query_id(self) -> int:
        self._next_query_id += 1
        return self._next_query_id

    def record(self, child: Child, snapshot: MetricsSnapshot) -> None:
        self.num_progress_reports += _step(snapshot) > _step(self.latest.get(child))
        self.latest[child] = snapshot
        if query := self.queries.get(snapshot.query_id):
            query.pending.discard(child)

    def forget(self, child: Child) -> None:
        """Removes a dead child. Its counters are kept, its gauges are dropped."""
        snapshot = self.latest.pop(child, None)
        if snapshot is not None:
            self.dead_process_families = merge([self.dead_process_families, without_gauges(snapshot.families)])
        for query_id, query in list(self.queries.items()):
            query.pending.discard(child)
            if query.requester is child:
                del self.queries[query_id]

    def pop_answerable(self, now_s: float) -> list[SnapshotQuery]:
        """Removes and returns the queries that all children have answered or whose deadline has passed."""
        done = [
            query_id for query_id, query in self.queries.items() if not query.pending or query.deadline_at_s <= now_s
        ]
        return [self.queries.pop(query_id) for query_id in done]

    def families(self) -> list[MetricFamily]:
        return merge([self.dead_process_families, *(snapshot.families for snapshot in self.latest.values())])

    def engine_stats(self) -> EngineStats | None:
        return next(
            (snapshot.engine for child, snapshot in self.latest.items() if child.role is ProcessRole.ENGINE), None
        )

    def has_no_handoffs(self, since_query_id: int) -> bool:
        """Returns whether the engine's answer to that query, or to a later one, says that no prompt is being computed
        and that no peer reads a block."""
        for child, snapshot in self.latest.items():
            if child.role is ProcessRole.ENGINE and snapshot.engine is not None and snapshot.query_id >= since_query_id:
                return not any(snapshot.engine.requests.values()) and not snapshot.engine.kv_blocks.get("sending", 0)
        return False


def _step(snapshot: MetricsSnapshot | None) -> int:
    return snapshot.engine.step if snapshot is not None and snapshot.engine is not None else 0
