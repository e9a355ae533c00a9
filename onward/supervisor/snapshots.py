"""One picture of the instance, from what each process says of itself, whichever process was asked for it.

Snapshots are asked for once a second and at each question. What a dead process had counted is kept, so a restart never
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
    """An api process waits for the picture; these children have not answered yet."""

    asker: Child
    ask_id: int
    deadline_at_s: float
    pending: set[Child]


@dataclass(slots=True)
class SnapshotAggregator:
    latest: dict[Child, MetricsSnapshot] = field(default_factory=dict)
    queries: dict[int, SnapshotQuery] = field(default_factory=dict)
    dead_process_families: list[MetricFamily] = field(default_factory=list)
    num_progress_reports: int = 0
    """Goes up whenever an engine is seen to have completed further steps."""
    _next_ask: int = 1

    def open_query(self, asker: Child, ask_id: int, asked: set[Child], now_s: float) -> int:
        number = self.next_ask_id()
        self.queries[number] = SnapshotQuery(asker, ask_id, now_s + SNAPSHOT_TIMEOUT_S, asked)
        return number

    def next_ask_id(self) -> int:
        self._next_ask += 1
        return self._next_ask

    def record(self, child: Child, snapshot: MetricsSnapshot) -> None:
        self.num_progress_reports += _step(snapshot) > _step(self.latest.get(child))
        self.latest[child] = snapshot
        if question := self.queries.get(snapshot.query_id):
            question.pending.discard(child)

    def forget(self, child: Child) -> None:
        """The child is dead: what it counted stays, what it held is gone."""
        snapshot = self.latest.pop(child, None)
        if snapshot is not None:
            self.dead_process_families = merge([self.dead_process_families, without_gauges(snapshot.families)])
        for number, question in list(self.queries.items()):
            question.pending.discard(child)
            if question.asker is child:
                del self.queries[number]

    def pop_answerable(self, now_s: float) -> list[SnapshotQuery]:
        """Questions that everyone has answered, or that cannot wait longer. They are closed by this."""
        done = [n for n, q in self.queries.items() if not q.pending or q.deadline_at_s <= now_s]
        return [self.queries.pop(number) for number in done]

    def families(self) -> list[MetricFamily]:
        return merge([self.dead_process_families, *(snapshot.families for snapshot in self.latest.values())])

    def engine_stats(self) -> EngineStats | None:
        return next((s.engine for child, s in self.latest.items() if child.role is ProcessRole.ENGINE), None)

    def has_no_handoffs(self, since_ask: int) -> bool:
        """Whether the engine has said so in an answer to that question or a later one: no prompt is being computed, and
        no block is being read by a peer."""
        for child, snapshot in self.latest.items():
            if child.role is ProcessRole.ENGINE and snapshot.engine is not None and snapshot.query_id >= since_ask:
                return not any(snapshot.engine.requests.values()) and not snapshot.engine.kv_blocks.get("sending", 0)
        return False


def _step(snapshot: MetricsSnapshot | None) -> int:
    return snapshot.engine.step if snapshot is not None and snapshot.engine is not None else 0
