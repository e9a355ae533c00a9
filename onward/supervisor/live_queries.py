"""Looks at the engine that api processes have asked for. Each api process has one under way; a later one replaces it."""

from dataclasses import dataclass, field

from onward.supervisor.children import Child

LIVE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class LiveQuery:
    requester: Child
    query_id: int
    """As the api process numbers it."""
    deadline_at_s: float


@dataclass(slots=True)
class LiveQueries:
    _open: dict[int, LiveQuery] = field(default_factory=dict)
    _next_id: int = 1

    def open(self, requester: Child, query_id: int, now_s: float) -> int:
        """Returns the number that the engine is asked under."""
        self.forget(requester)
        own_id, self._next_id = self._next_id, self._next_id + 1
        self._open[own_id] = LiveQuery(requester, query_id, now_s + LIVE_TIMEOUT_S)
        return own_id

    def close(self, own_id: int) -> LiveQuery | None:
        """The engine has answered. None: too late, or the api process has gone."""
        return self._open.pop(own_id, None)

    def pop_late(self, now_s: float) -> list[LiveQuery]:
        late = [own_id for own_id, query in self._open.items() if query.deadline_at_s <= now_s]
        return [self._open.pop(own_id) for own_id in late]

    def pop_all(self) -> list[LiveQuery]:
        """The engine is dead: none of them will be answered."""
        queries, self._open = list(self._open.values()), {}
        return queries

    def forget(self, requester: Child) -> None:
        self._open = {own_id: query for own_id, query in self._open.items() if query.requester is not requester}

    def deadlines(self) -> list[float]:
        return [query.deadline_at_s for query in self._open.values()]
