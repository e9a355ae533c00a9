"""Requests in the order in which they are served. Used for waiting and for running requests."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from onward.engine.request import Request
from onward.engine.scheduling.scheduling_policy import QueueKey, queue_key


class RequestQueue:
    def __init__(self) -> None:
        self._entries: list[tuple[QueueKey, Request]] = []
        self.num_prompt_tokens = 0
        """Prompt tokens of all requests in the queue."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: Request) -> bool:
        index = self._index(request)
        return index < len(self._entries) and self._entries[index][1] is request

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._entries)

    def first(self) -> Request | None:
        return self._entries[0][1] if self._entries else None

    def add(self, request: Request) -> None:
        self.num_prompt_tokens += request.num_prompt
        insort(self._entries, (queue_key(request), request), key=lambda entry: entry[0])

    def remove(self, request: Request) -> None:
        assert request in self, f"{request.request_id} is not in this queue"
        del self._entries[self._index(request)]
        self.num_prompt_tokens -= request.num_prompt

    def discard(self, request: Request) -> None:
        if request in self:
            self.remove(request)

    def num_prompt_tokens_after(self, num_first: int) -> int:
        """Returns the number of prompt tokens of all requests but the first `num_first`."""
        return self.num_prompt_tokens - sum(request.num_prompt for request in islice(self, max(0, num_first)))

    def _index(self, request: Request) -> int:
        """Returns the index at which the request is, or would be inserted."""
        return bisect_left(self._entries, queue_key(request), key=lambda entry: entry[0])
