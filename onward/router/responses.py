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
from onward.proto.router import RESPONSE_PATH, AskResponse, GivenChoice, Record
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
MAX_CANCELS, MAX_CANCELLING = 1024, 64
"""Responses that aborts end: those that wait for it, and those that instances are told of at a time."""
NUM_COPIES = 2
"""Instances that keep the end of a response, so that it is not lost with one of them."""
ABORTED, REPLACED = "aborted", "stale_attempt"
"""Codes of errors of a run that was ended by an abort, or by a cancel or a later attempt, which decides what is kept."""

_records = msgspec.msgpack.Decoder(Record)


class FoundResponses:
    """`Responses` of `web.response_endpoint`, behind a router."""

    ask_every_s = 0.2

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._cancels: set[asyncio.Task[Record | None]] = set()
        self._cancelling = asyncio.Semaphore(MAX_CANCELLING)

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
        """At all instances, so that none keeps how a run ends that is ended by this."""
        request_id, caller = record.attempt.request_id, record.attempt.caller
        live = self._serving.core.live(request_id)
        if live is not None and live.stream.origin.caller == caller:
            live.is_deleted = True
        question = msgspec.msgpack.encode(AskResponse(what="delete", record=record))
        pass_on = self._serving.upstream.pass_on
        await asyncio.gather(*(pass_on(one.url, RESPONSE_PATH, question) for one in self._takers()))
        self._serving.end_here([request_id], caller or None)
        self._serving.core.records.drop(request_id)

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

    async def cancelled(self, caller: Caller | None, request_id: str) -> Record | None:
        """As instances keep it, if it was cancelled. Of this caller; None: of anybody."""
        kept = (await kept_at_instances(self._serving, request_id)).records
        mine = [one for one in kept if caller is None or may_see(caller, one.attempt.caller)]
        record = max((one for one in mine if one.attempt.path == PATH), key=_rank, default=None)
        return record if record is not None and record.is_cancelled else None

    async def rest(self, record: Record, num_told: int | None) -> bytes:
        """The events of a response that is over, behind those that this number of tokens has brought about."""
        return await self._answered(AskResponse(what="rest", record=record, num_told=num_told))

    async def asked(
        self, what: Any, record: Record, *, after: int = -1, query: Mapping[str, str] | None = None
    ) -> bytes:
        return await self._answered(AskResponse(what=what, record=record, after=after, query=dict(query or {})))

    async def _answered(self, ask: AskResponse) -> bytes:
        """What an instance answers. Raises its refusal."""
        question = msgspec.msgpack.encode(ask)
        for replica in sorted(self._takers(), key=_is_troubled)[:MAX_ASKED]:
            answer = await self._serving.upstream.pass_on(replica.url, RESPONSE_PATH, question)
            if answer is None or answer.status >= 500:
                continue
            if answer.status != 200:
                raise RequestFailed(info_from_body(answer.body, answer.status))
            return answer.body
        raise Unavailable("there is no instance that could answer", retry_after_s=1.0)

    async def cancel(self, record: Record) -> Record:
        """The instance that has most of it is told first: where it completes before that, it is not cancelled. What it
        keeps, which may be more than this router knows, is then kept at all others that can be reached: it is shown the
        same whichever of them is asked later, and is not carried on there. What is kept."""
        attempt = msgspec.structs.replace(record.attempt, epoch=record.attempt.epoch + 1)
        cancelled = msgspec.structs.replace(record, attempt=attempt, is_live=False, is_cancelled=True)
        urls = {replica.url for replica in self._takers()}
        found = (await kept_at_instances(self._serving, attempt.request_id)).by_url
        holders = sorted(urls & found.keys(), key=lambda url: (_rank(found[url]), url), reverse=True)
        kept: list[Record] = []
        for told in (holders[:1], holders[1:], sorted(urls - found.keys())):
            kept += await self._keep(cancelled, told)
            if kept and not any(one.is_cancelled for one in kept):
                return max(kept, key=_rank)
            cancelled = max([cancelled, *kept], key=_rank)
        if not kept:
            raise Unavailable("there is no instance that could keep it", retry_after_s=1.0)
        # An instance that could not be reached may still run it for this router.
        self._serving.end_here([attempt.request_id], attempt.caller or None)
        return max(kept, key=_rank)

    async def cancel_soon(self, record: Record, timeout_s: float) -> Record | None:
        """As `cancel`, which goes on where an instance takes longer than that. None: it is not known yet what is kept."""
        if len(self._cancels) >= MAX_CANCELS:
            return None
        task = asyncio.create_task(self._cancelled_or_not(record))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)
        done, _ = await asyncio.wait((task,), timeout=timeout_s)
        return task.result() if done else None

    async def cancel_idle(self, request_id: str, timeout_s: float) -> bool:
        """A response that instances keep and that nothing runs. One of them may have completed it while another one has a
        record from before that: the furthest one counts. Whether it is cancelled, as far as is known within that time."""
        kept = (await kept_at_instances(self._serving, request_id)).records
        furthest = max((one for one in kept if one.attempt.path == PATH), key=_rank, default=None)
        if furthest is None or furthest.is_over:
            return furthest is not None and furthest.is_cancelled
        cancelled = await self.cancel_soon(furthest, timeout_s)
        return cancelled is None or cancelled.is_cancelled

    async def _cancelled_or_not(self, record: Record) -> Record | None:
        async with self._cancelling:
            try:
                return await self.cancel(record)
            except Unavailable:
                return None

    async def keep_end(self, stream: Stream, error: ErrorInfo | None = None) -> None:
        """What became of a response that this router has carried. If no instance can be reached, this router's own record
        is all there is of it, and the next client that asks has it carried on."""
        if error is not None and error.code == REPLACED:
            return
        record = msgspec.structs.replace(self.record_of(stream, is_live=False), error=error)
        has_it = stream.instance if error is None else None
        others = [one for one in self._takers() if one.instance != has_it and not _is_troubled(one)]
        others.sort(key=lambda one: zlib.crc32(f"{stream.request_id} {one.instance}".encode()))
        await self._keep(record, [one.url for one in others[: NUM_COPIES - (has_it is not None)]])

    async def _keep(self, record: Record, urls: Sequence[str]) -> list[Record]:
        """What the instances keep that could be reached."""
        question = msgspec.msgpack.encode(AskResponse(what="keep", record=record))
        pass_on = self._serving.upstream.pass_on
        answers = await asyncio.gather(*(pass_on(url, RESPONSE_PATH, question) for url in urls))
        return [_records.decode(answer.body) for answer in answers if answer is not None and answer.status == 200]

    def _takers(self) -> list[Replica]:
        return self._serving.core.takers(self._serving.clock.now_s())

    def record_of(self, stream: Stream, *, is_live: bool) -> Record:
        attempt = stream.attempt(self._serving.clock.now_s(), [])
        if stream.was_aborted:
            # At its instance: the record says how it has ended, and not its choice.
            attempt = msgspec.structs.replace(attempt, choices=[GivenChoice(one.token_ids) for one in attempt.choices])
        return Record(attempt=attempt, is_live=is_live, is_cancelled=stream.was_aborted)

    def _own(self, request_id: str) -> list[Record]:
        core = self._serving.core
        live = core.live(request_id)
        if live is not None:
            return [] if live.is_deleted else [self.record_of(live.stream, is_live=True)]
        kept = core.records.find(request_id, self._serving.clock.now_s())
        return [] if kept is None else [self.record_of(kept, is_live=False)]


def _is_troubled(replica: Replica) -> bool:
    """Whoever is well is asked first: a question that nobody answers is waited for."""
    return replica.state is not State.READY


def _rank(record: Record) -> tuple[bool, bool, bool, int, int, int]:
    """One that was cancelled stays so, although an instance that could not be reached has completed it."""
    num_tokens = sum(len(choice.token_ids) for choice in record.attempt.choices)
    return record.is_over, record.is_cancelled, record.is_live, num_tokens, len(record.scores), record.attempt.epoch
