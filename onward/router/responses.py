"""Responses as a router finds them: those that it carries, those that it remembers, and those that instances keep.

What a record says, an instance tells: the router does not know what tokens mean.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from onward.errors import Unavailable
from onward.proto.request import ErrorInfo
from onward.proto.router import RESPONSE_PATH, AskResponse, Record
from onward.router.core import out_of_reach
from onward.router.failures import info_from_body
from onward.router.kept import kept_at_instances
from onward.router.replicas import Replica, State
from onward.router.serving import Serving
from onward.router.stream import Stream
from onward.web.callers import may_see
from onward.web.failures import RequestFailed
from onward.web.keys import Caller
from onward.web.response_ids import PATH, own_request_id, unknown

MAX_ASKED = 3
ASK_AGAIN_S = 0.5
MAX_FAILED = 1024
_ENDED_BY_OTHERS = ("aborted", "stale_attempt")
"""What became of it, they say."""


class _Number(msgspec.Struct, frozen=True):
    sequence_number: int = -1


_numbers = msgspec.json.Decoder(_Number)


class FoundResponses:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._failed: OrderedDict[str, ErrorInfo] = OrderedDict()
        """What was made in the background and came to nothing, latest last."""
        self._ending: dict[str, Record] = {}
        """What somebody cancels just now: the instances have dropped it, and not been told yet what to keep."""

    def now_s(self) -> float:
        return self._serving.clock.now_s()

    async def find(self, caller: Caller, response_id: str, param: str = "response_id") -> Record:
        """The furthest record that anybody has of it. A router that has just started waits for the instances to register
        before it says that nobody has it; and it does not say so while one of them cannot be asked."""
        request_id, serving = own_request_id(caller, response_id, param), self._serving
        while True:
            kept = await kept_at_instances(serving, request_id)
            record = self._furthest(caller, request_id, kept.records)
            if record is not None:
                return record
            if serving.clock.now_s() >= serving.settled_s:
                break
            await serving.wait_for_change(ASK_AGAIN_S)
        raise unknown(response_id, param) if kept.is_all else out_of_reach(param)

    def _furthest(self, caller: Caller, request_id: str, kept: list[Record]) -> Record | None:
        records = [*self._own(request_id), *kept]
        mine = [one for one in records if one.attempt.path == PATH and may_see(caller, one.attempt.caller)]
        if not mine:
            return None
        best = max(mine, key=_rank)
        failed = self._failed.get(request_id)
        return best if failed is None or best.is_over else msgspec.structs.replace(best, error=failed, is_live=False)

    async def asked(
        self, what: Any, record: Record, *, after: int = -1, query: Mapping[str, str] | None = None
    ) -> bytes:
        """What an instance answers. Raises its refusal."""
        question = msgspec.msgpack.encode(AskResponse(what=what, record=record, after=after, query=dict(query or {})))
        takers = self._serving.core.takers(self._serving.clock.now_s())
        for replica in sorted(takers, key=_is_troubled)[:MAX_ASKED]:
            answer = await self._serving.upstream.pass_on(replica.url, RESPONSE_PATH, question)
            if answer is None or answer.status >= 500:
                continue
            if answer.status != 200:
                raise RequestFailed(info_from_body(answer.body, answer.status))
            return answer.body
        raise Unavailable("there is no instance that could answer", retry_after_s=1.0)

    async def keep(self, record: Record) -> None:
        """At every instance that can be reached: so it is not lost with one of them."""
        question = msgspec.msgpack.encode(AskResponse(what="keep", record=record))
        serving = self._serving
        urls = [replica.url for replica in serving.core.takers(serving.clock.now_s())]
        answers = await asyncio.gather(*(serving.upstream.pass_on(url, RESPONSE_PATH, question) for url in urls))
        if not any(answer is not None and answer.status == 200 for answer in answers):
            raise Unavailable("there is no instance that could keep it", retry_after_s=1.0)

    @contextmanager
    def ending(self, record: Record) -> Iterator[None]:
        """Meanwhile it is found as it will be."""
        self._ending[record.attempt.request_id] = record
        try:
            yield
        finally:
            self._ending.pop(record.attempt.request_id, None)

    def record_of(self, stream: Stream, *, is_live: bool) -> Record:
        return Record(attempt=stream.attempt(self._serving.clock.now_s(), []), is_live=is_live)

    def note_failure(self, request_id: str, info: ErrorInfo) -> None:
        if info.code in _ENDED_BY_OTHERS:
            return
        self._failed[request_id] = info
        while len(self._failed) > MAX_FAILED:
            self._failed.popitem(last=False)

    def forget(self, request_id: str) -> None:
        self._failed.pop(request_id, None)

    def _own(self, request_id: str) -> list[Record]:
        if (ending := self._ending.get(request_id)) is not None:
            return [ending]
        core = self._serving.core
        live = core.live(request_id)
        if live is not None:
            return [self.record_of(live.stream, is_live=True)]
        kept = core.records.find(request_id, self._serving.clock.now_s())
        return [] if kept is None else [self.record_of(kept, is_live=False)]


def _is_troubled(replica: Replica) -> bool:
    """Whoever is well is asked first: a question that nobody answers is waited for."""
    return replica.state is not State.READY


def _rank(record: Record) -> tuple[bool, bool, int, int, int]:
    num_tokens = sum(len(choice.token_ids) for choice in record.attempt.choices)
    return record.is_over, record.is_live, num_tokens, len(record.scores), record.attempt.epoch


def last_number(events: bytes) -> int:
    """Of the last of these events; -1: they have none."""
    _, _, data = events.rpartition(b"\ndata: ")
    try:
        return _numbers.decode(data.strip()).sequence_number
    except msgspec.MsgspecError:
        return -1
