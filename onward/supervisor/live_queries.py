"""Queries of api processes for the live state of the engine. Each api process has at most one open query; a later one
replaces it."""

from dataclasses import dataclass, field

from onward.supervisor.children import Child

LIVE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class PendingLiveQuery:
    requester: Child
    query_id: int
    """The number that the api process gave it."""
    deadline_at_s: float


@dataclass(slots=True)
class LiveQueries:
    _open: dict[int, PendingLiveQuery] = field(default_factory=dict)
    _next_id: int = 1

    def open(self, requester: Child, query_id: int, now_s: float) -> int:
        """Registers a query. Returns the id under which the engine is asked."""
        self.forget(requester)
        own_id, self._next_id = self._next_id, self._next_id + 1
        self._open[own_id] = PendingLiveQuery(requester, query_id, now_s + LIVE_TIMEOUT_S)
        return own_id

    def close(self, own_id: int) -> PendingLiveQuery | None:
        """Returns the query that the engine has answered. None if the answer is too late or the api process is gone."""
        return self._open.pop(own_id, None)

    def pop_late(self, now_s: float) -> list[PendingLiveQuery]:
        late = [own_id for own_id, query in self._open.items() if query.deadline_at_s <= now_s]
        return [self._open.pop(own_id) for own_id in late]

    def pop_all(self) -> list[PendingLiveQuery]:
        """Removes and returns all queries. Called when no engine is ready to answer them."""
        queries, self._open = list(self._open.values()), {}
        return queries

    def forget(self, requester: Child) -> None:
        self._open = {own_id: query for own_id, query in self._open.items() if query.requester is not requester}

    def deadlines(self) -> list[float]:
        return [query.deadline_at_s for query in self._open.values()]
