"""One picture of the instance, from what each process says of itself, whichever process was asked for it.

Snapshots are asked for once a second and at each question. What a dead process had counted is kept, so a restart never
makes a counter go back.
"""

from dataclasses import dataclass, field

from onward.obs.metrics import merge, without_gauges
from onward.proto.control import Snapshot
from onward.proto.stats import EngineStats, Family
from onward.supervisor.children import Child, Role

ANSWER_TIMEOUT_S = 1.0


@dataclass(slots=True)
class Question:
    """An api process waits for the picture; these children have not answered yet."""

    asker: Child
    ask_id: int
    deadline_s: float
    missing: set[Child]


@dataclass(slots=True)
class Hub:
    latest: dict[Child, Snapshot] = field(default_factory=dict)
    heard_s: dict[Child, float] = field(default_factory=dict)
    questions: dict[int, Question] = field(default_factory=dict)
    departed: list[Family] = field(default_factory=list)
    progress: int = 0
    """Goes up whenever an engine is seen to have completed further steps."""
    _next_ask: int = 1

    def open_question(self, asker: Child, ask_id: int, asked: set[Child], now_s: float) -> int:
        number = self.next_number()
        self.questions[number] = Question(asker, ask_id, now_s + ANSWER_TIMEOUT_S, asked)
        return number

    def next_number(self) -> int:
        self._next_ask += 1
        return self._next_ask

    def take(self, child: Child, snapshot: Snapshot, now_s: float) -> None:
        self.progress += _step(snapshot) > _step(self.latest.get(child))
        self.latest[child] = snapshot
        self.heard_s[child] = now_s
        if question := self.questions.get(snapshot.ask_id):
            question.missing.discard(child)

    def forget(self, child: Child) -> None:
        """The child is dead: what it counted stays, what it held is gone."""
        snapshot = self.latest.pop(child, None)
        self.heard_s.pop(child, None)
        if snapshot is not None:
            self.departed = merge([self.departed, without_gauges(snapshot.families)])
        for number, question in list(self.questions.items()):
            question.missing.discard(child)
            if question.asker is child:
                del self.questions[number]

    def answerable(self, now_s: float) -> list[Question]:
        """Questions that everyone has answered, or that cannot wait longer. They are closed by this."""
        done = [n for n, q in self.questions.items() if not q.missing or q.deadline_s <= now_s]
        return [self.questions.pop(number) for number in done]

    def families(self) -> list[Family]:
        return merge([self.departed, *(snapshot.families for snapshot in self.latest.values())])

    def engine_stats(self) -> EngineStats | None:
        return next((s.engine for child, s in self.latest.items() if child.role is Role.ENGINE), None)

    def nothing_is_handed_over(self, since_ask: int) -> bool:
        """Whether the engine has said so in an answer to that question or a later one: no prompt is being computed, and
        no block is being read by a peer."""
        for child, snapshot in self.latest.items():
            if child.role is Role.ENGINE and snapshot.engine is not None and snapshot.ask_id >= since_ask:
                return not any(snapshot.engine.requests.values()) and not snapshot.engine.kv_blocks.get("sending", 0)
        return False


def _step(snapshot: Snapshot | None) -> int:
    return snapshot.engine.step if snapshot is not None and snapshot.engine is not None else 0
