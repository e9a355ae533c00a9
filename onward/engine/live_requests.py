"""The requests that an engine holds, with an index for each question that every submission or abort asks.

Thousands may be live, so no question is answered by a scan. A prompt that is computed for a peer belongs to no caller here:
the peer's own instance counts and aborts it.
"""

from collections.abc import Iterable, Iterator, ValuesView
from dataclasses import dataclass

from onward.engine.request import Request
from onward.timers import Timers

_Index = dict[str, dict[str, Request]]
"""Requests by id, under each key. No entry is empty."""


@dataclass(frozen=True, slots=True)
class CallerInFlight:
    """The live requests of one caller, as its limits on a further request see them."""

    num_requests: int = 0
    has_sibling_choice: bool = False
    """Another choice of the same request is live."""
    has_same_prompt: bool = False
    """One of these live choices has the same prompt."""


class LiveRequests:
    def __init__(self) -> None:
        self._by_id: dict[str, Request] = {}
        self._num_added = 0
        self._by_caller: _Index = {}
        self._by_name: _Index = {}
        """By the name and by the label."""
        self._choices: dict[tuple[str, str], dict[int, dict[str, Request]]] = {}
        """Requests with limits: by caller and name, then by the hash of the prompt, then by id."""
        self._prompt_hashes: dict[str, int] = {}
        self._deadlines: Timers[str] = Timers()

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __getitem__(self, request_id: str) -> Request:
        return self._by_id[request_id]

    def get(self, request_id: str) -> Request | None:
        return self._by_id.get(request_id)

    def values(self) -> ValuesView[Request]:
        return self._by_id.values()

    def add(self, request: Request) -> None:
        assert request.request_id not in self._by_id, f"{request.request_id} is live already"
        self._by_id[request.request_id] = request
        self._num_added += 1
        request.arrival_number = request.arrival_number or self._num_added
        if request.deadline_at_s is not None:
            self._deadlines.set_earliest(request.request_id, request.deadline_at_s)
        if request.handoff is not None:
            return
        _put(self._by_caller, request.caller, request)
        for name in _names(request):
            _put(self._by_name, name, request)
        if request.spec.caller_limits is not None:
            prompt_hash = self._prompt_hashes[request.request_id] = _prompt_hash(request)
            by_prompt = self._choices.setdefault((request.caller, request.external_id), {})
            by_prompt.setdefault(prompt_hash, {})[request.request_id] = request

    def remove(self, request: Request) -> None:
        del self._by_id[request.request_id]
        self._deadlines.cancel(request.request_id)
        if request.handoff is not None:
            return
        _drop(self._by_caller, request.caller, request)
        for name in _names(request):
            _drop(self._by_name, name, request)
        prompt_hash = self._prompt_hashes.pop(request.request_id, None)
        if prompt_hash is not None:
            by_prompt = self._choices[request.caller, request.external_id]
            del by_prompt[prompt_hash][request.request_id]
            if not by_prompt[prompt_hash]:
                del by_prompt[prompt_hash]
            if not by_prompt:
                del self._choices[request.caller, request.external_id]

    def take_past_deadline(self, now_s: float) -> list[Request]:
        """Returns the requests whose deadline has passed since the last call."""
        return [self._by_id[request_id] for request_id in self._deadlines.take_due(now_s)]

    def of_caller(self, caller: str | None) -> Iterable[Request]:
        """Returns the requests of one caller, or of all callers for None, without the prompts that are computed for
        peers."""
        if caller is not None:
            return self._by_caller.get(caller, {}).values()
        return (request for request in self._by_id.values() if request.handoff is None)

    def find_by_name(self, name: str, caller: str | None) -> list[Request]:
        """Returns the requests whose name or label equals `name`: those of one caller, or of all callers for None."""
        return [r for r in self._by_name.get(name, {}).values() if caller in (None, r.caller)]

    def in_flight_of_caller(self, request: Request) -> CallerInFlight:
        """Counts what the caller of this request has in flight, without an earlier epoch of the same request."""
        own = self._by_caller.get(request.caller, {})
        by_prompt = self._choices.get((request.caller, request.external_id), {})
        same_prompt = by_prompt.get(_prompt_hash(request), {}) if by_prompt else {}
        return CallerInFlight(
            num_requests=len(own) - (request.request_id in own),
            has_sibling_choice=any(key != request.request_id for choices in by_prompt.values() for key in choices),
            has_same_prompt=any(
                key != request.request_id and _have_same_prompt(request, other) for key, other in same_prompt.items()
            ),
        )


def _names(request: Request) -> set[str]:
    return {request.external_id, request.spec.client_request_id} - {""}


def _put(index: _Index, key: str, request: Request) -> None:
    index.setdefault(key, {})[request.request_id] = request


def _drop(index: _Index, key: str, request: Request) -> None:
    requests = index[key]
    del requests[request.request_id]
    if not requests:
        del index[key]


def _prompt_hash(request: Request) -> int:
    return hash(tuple(request.token_ids[: request.num_prompt]))


def _have_same_prompt(request: Request, other: Request) -> bool:
    """Returns whether the prompts have the same tokens. The caller has found equal hashes, which different prompts can
    have."""
    if other.num_prompt != request.num_prompt:
        return False
    return other.token_ids[: other.num_prompt] == request.token_ids[: request.num_prompt]
