"""Responses as a router finds them: those that it carries, those that it remembers, and those that instances keep.

What a record says, an instance tells: the router does not know what tokens mean.
"""

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from onward.errors import Unavailable
from onward.proto.request import ErrorInfo
from onward.proto.router import RESPONSE_PATH, AskResponse, KeptEnd, Record
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
REACH_S = 5.0
"""How long a question waits for an instance that cannot be asked. Within this time a response whose instance has died runs
at another one, or the instance has restarted its api process."""
NUM_COPIES = 2
"""Instances that keep the end of a response, so that it is not lost with one of them."""
_ENDED_BY_OTHERS = ("aborted", "stale_attempt")
"""Errors of a run that was ended by an abort, a cancel or a later attempt, which decides what is kept."""


_kept_ends = msgspec.json.Decoder(KeptEnd)


class FoundResponses:
    """`Responses` of `web.response_endpoint`, behind a router."""

    ask_every_s = 0.2

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def now_s(self) -> float:
        return self._serving.clock.now_s()

    def reader(self) -> "FoundResponses":
        return self

    async def events(self, record: Record, after: int) -> bytes:
        return await self.asked("events", record, after=after)

    async def show(self, record: Record) -> bytes:
        return await self.asked("show", record)

    async def input_items(self, record: Record, query: Mapping[str, str]) -> bytes:
        return await self.asked("input_items", record, query=query)

    async def context(self, record: Record) -> bytes:
        return await self.asked("context", record)

    async def take_up(self, record: Record) -> None:
        await self.asked("take_up", record)

    async def delete(self, record: Record) -> None:
        await self._serving.abort([record.attempt.request_id], record.attempt.caller or None)

    async def find(self, caller: Caller, response_id: str, param: str = "response_id") -> Record:
        """The furthest record that this router and the instances have. A router that has just started waits for the
        instances to register before it answers 404; while an instance cannot be asked, it waits, and then answers 503."""
        request_id, serving = own_request_id(caller, response_id, param), self._serving
        out_of_reach_s = serving.clock.now_s() + REACH_S
        while True:
            kept = await kept_at_instances(serving, request_id)
            record = self._furthest(caller, request_id, kept.records)
            if record is not None:
                return record
            if serving.clock.now_s() >= (serving.settled_s if kept.is_all else out_of_reach_s):
                break
            await serving.wait_for_change(ASK_AGAIN_S)
        raise unknown(response_id, param) if kept.is_all else out_of_reach(param)

    def _furthest(self, caller: Caller, request_id: str, kept: list[Record]) -> Record | None:
        records = [*self._own(request_id), *kept]
        mine = [one for one in records if one.attempt.path == PATH and may_see(caller, one.attempt.caller)]
        return max(mine, key=_rank, default=None)

    async def asked(
        self, what: Any, record: Record, *, after: int = -1, query: Mapping[str, str] | None = None
    ) -> bytes:
        """What an instance answers. Raises its refusal."""
        question = msgspec.msgpack.encode(AskResponse(what=what, record=record, after=after, query=dict(query or {})))
        for replica in sorted(self._takers(), key=_is_troubled)[:MAX_ASKED]:
            answer = await self._serving.upstream.pass_on(replica.url, RESPONSE_PATH, question)
            if answer is None or answer.status >= 500:
                continue
            if answer.status != 200:
                raise RequestFailed(info_from_body(answer.body, answer.status))
            return answer.body
        raise Unavailable("there is no instance that could answer", retry_after_s=1.0)

    async def cancel(self, record: Record) -> None:
        """Those instances that have the response are told first: where it completes before that, it is not cancelled. Then
        it is kept as cancelled at all others that can be reached, so that it is not carried on there."""
        attempt = msgspec.structs.replace(record.attempt, epoch=record.attempt.epoch + 1)
        cancelled = msgspec.structs.replace(record, attempt=attempt, is_live=False, is_cancelled=True)
        urls = {replica.url for replica in self._takers()}
        holders = urls & (await kept_at_instances(self._serving, attempt.request_id)).by_url.keys()
        kept = await self._keep(cancelled, sorted(holders))
        if any(not one.is_cancelled for one in kept):
            return
        kept += await self._keep(cancelled, sorted(urls - holders))
        if not kept:
            raise Unavailable("there is no instance that could keep it", retry_after_s=1.0)
        # An instance that could not be reached may still run it for this router.
        self._serving.end_here([attempt.request_id], attempt.caller or None)

    async def keep_end(self, stream: Stream, error: ErrorInfo | None = None) -> None:
        """What became of a response that this router has carried. If no instance can be reached, this router's own record
        is all there is of it, and the next client that asks has it carried on."""
        if error is not None and error.code in _ENDED_BY_OTHERS:
            return
        record = msgspec.structs.replace(self.record_of(stream, is_live=False), error=error)
        has_it = stream.instance if error is None else None
        others = [one for one in self._takers() if one.instance != has_it and not _is_troubled(one)]
        others.sort(key=lambda one: zlib.crc32(f"{stream.request_id} {one.instance}".encode()))
        await self._keep(record, [one.url for one in others[: NUM_COPIES - (has_it is not None)]])

    async def _keep(self, record: Record, urls: Sequence[str]) -> list[KeptEnd]:
        """What the instances say that could be reached."""
        question = msgspec.msgpack.encode(AskResponse(what="keep", record=record))
        pass_on = self._serving.upstream.pass_on
        answers = await asyncio.gather(*(pass_on(url, RESPONSE_PATH, question) for url in urls))
        return [_kept_ends.decode(answer.body) for answer in answers if answer is not None and answer.status == 200]

    def _takers(self) -> list[Replica]:
        return self._serving.core.takers(self._serving.clock.now_s())

    def record_of(self, stream: Stream, *, is_live: bool) -> Record:
        return Record(attempt=stream.attempt(self._serving.clock.now_s(), []), is_live=is_live)

    def _own(self, request_id: str) -> list[Record]:
        core = self._serving.core
        live = core.live(request_id)
        if live is not None:
            return [self.record_of(live.stream, is_live=True)]
        kept = core.records.find(request_id, self._serving.clock.now_s())
        return [] if kept is None else [self.record_of(kept, is_live=False)]


def _is_troubled(replica: Replica) -> bool:
    """Whoever is well is asked first: a question that nobody answers is waited for."""
    return replica.state is not State.READY


def _rank(record: Record) -> tuple[bool, bool, bool, int, int, int]:
    """One that was cancelled stays so, although an instance that could not be reached has completed it."""
    num_tokens = sum(len(choice.token_ids) for choice in record.attempt.choices)
    return record.is_over, record.is_cancelled, record.is_live, num_tokens, len(record.scores), record.attempt.epoch
