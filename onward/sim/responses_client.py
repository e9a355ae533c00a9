"""A client of `/v1/responses` in a simulation: has a response made, goes away, comes back for it by its id and from any
number on, cancels it, deletes it, waits until it is forgotten; and knows what it may be told."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import aiohttp
import msgspec

from onward.sim import response_check, tenants
from onward.sim.client import MAX_TRIES, RETRY_S, RETRYABLE, RequestRefused, SimClient, StreamInterrupted, events_of
from onward.sim.http import SimHttpResponse as HttpResponse
from onward.sim.instance import RESPONSE_TTL_S
from onward.sim.reply_check import InvariantError, ReplyChecker
from onward.sim.response_check import ConflictingEndError, ResponseChecker

POLL_S = 0.4
MAX_SLOW_CLOCK = 1.2
WORK_ENDS_S = 0.5
"""After a cancel, where nothing keeps the word of it from anybody."""
_OF_ABORTS = ("aborted", "stream_unknown", "response_not_found")
_STATUSES = {"rate_limit_exceeded": 429, "invalid_prompt": 400}


class RunConditions(Protocol):
    """What a client cannot know, and a judge of what it was told must."""

    def may_lose_records(self, *, is_background: bool) -> bool:
        """Whether what keeps records, or the way there, has suffered."""
        ...

    def may_lose_tokens(self) -> bool:
        """Whether a process that ran a response, or the way to it, was lost with tokens that were told."""
        ...

    def is_undisturbed(self) -> bool:
        """Nothing has happened but what clients do."""
        ...

    def is_computed(self, request_id: str) -> bool:
        """Whether an engine works on it."""
        ...


class ResponseForgotten(Exception):
    """Nobody has a response of this id."""


class SimResponsesClient(SimClient):
    def __init__(self, circumstances: RunConditions, *what: Any, is_routed: bool, **rest: Any) -> None:
        """`what` and `rest` are as for any visitor."""
        super().__init__(*what, **rest)
        self._circumstances, self._is_routed = circumstances, is_routed

    def _reply(self, history: list[dict[str, str]]) -> ReplyChecker:
        return ResponseChecker(self.request, self._prompt(history))

    def _body(self, history: list[dict[str, str]]) -> dict[str, Any]:
        return response_check.body_of(self.request)

    def _timed_actions(self) -> list[tuple[float, Callable[[], Any]]]:
        cancel_at_s = self.request.cancel_at_s
        return super()._timed_actions() + ([] if cancel_at_s is None else [(cancel_at_s, self._cancel)])

    async def _try(self, answer: ReplyChecker, body: dict[str, Any]) -> None:
        assert isinstance(answer, ResponseChecker)
        try:
            if not answer.response_id:
                await self._create(answer, body)
            while not answer.is_finished:
                if self._has_left:
                    raise StreamInterrupted("it has left", visible=False)
                await self._go_on(answer, body)
            await self._check_after_end(answer)
        except ResponseForgotten:
            self._begin_again(answer)
        except ConflictingEndError:
            if not self._may_forget():
                raise
        except (aiohttp.ClientError, OSError) as fault:
            raise StreamInterrupted(type(fault).__name__, visible=False) from None

    # It is made.

    async def _create(self, answer: ResponseChecker, body: dict[str, Any]) -> None:
        answer.restart()
        headers = self._headers | {"X-Request-Id": self.label}
        posted = self._session.post(
            self._pick_url() + response_check.PATH, data=msgspec.json.encode(body), headers=headers
        )
        async with posted as response:
            if not self.request.is_streaming:
                await self._take_shown(answer, response)
            else:
                await self._follow(answer, response, is_own=True)
        if self.request.detach_s is not None:
            self._web.ground.active_faults.trigger_counts["detach"] += 1
            self._note(f"{self.label} leaves {answer.response_id} to itself")
            await asyncio.sleep(self.request.detach_s)

    # It is asked for.

    async def _go_on(self, answer: ResponseChecker, body: dict[str, Any]) -> None:
        ways = [self._follow_on]
        if self.request.background:
            ways.append(self._poll)
        if answer.cursor:
            ways.append(lambda answer: self._follow_from_cursor(answer, body))
        await self._chance.choice(ways)(answer)

    async def _poll(self, answer: ResponseChecker) -> None:
        async with self._asked("GET", answer) as response:
            await self._take_shown(answer, response)
        if not answer.is_finished:
            await asyncio.sleep(POLL_S)

    async def _follow_on(self, answer: ResponseChecker) -> None:
        """From where it is, or from further back."""
        last = len(answer.events) - 1
        after = last if self._chance.happens(0.7) else self._chance.randint(-1, last)
        answer.go_on_behind(after)
        query = "?stream=true" + (f"&starting_after={after}" if after >= 0 else "")
        async with self._asked("GET", answer, query) as response:
            await self._follow(answer, response)

    async def _follow_from_cursor(self, answer: ResponseChecker, body: dict[str, Any]) -> None:
        answer.go_on_from_cursor()
        url, place = self._pick_url() + response_check.PATH, {"Last-Event-ID": answer.cursor}
        if self._chance.happens(0.5):
            asked = self._session.get(url, headers=tenants.auth_header(self.request.caller) | place)
        else:
            headers = self._headers | {"X-Request-Id": self.label} | place
            asked = self._session.post(url, data=msgspec.json.encode(body), headers=headers)
        async with asked as response:
            await self._follow(answer, response, is_own=True)

    def _asked(self, method: str, answer: ResponseChecker, more: str = "") -> Any:
        url = f"{self._pick_url()}{response_check.PATH}/{answer.response_id}{more}"
        return self._session.request(method, url, headers=tenants.auth_header(self.request.caller))

    async def _take_shown(self, answer: ResponseChecker, response: HttpResponse) -> None:
        body = await self._read(answer, response)
        answer.take_whole(body)
        self._check_failure(answer)

    async def _follow(self, answer: ResponseChecker, response: HttpResponse, *, is_own: bool = False) -> None:
        """`is_own`: the connection belongs to the response, which so has an end or a connection that is lost."""
        if response.status != 200:
            await self._read(answer, response)
        self._response = response
        try:
            async for event_id, data in events_of(response):
                answer.take_event(event_id, msgspec.json.decode(data))
                if answer.lost_events and not self._circumstances.may_lose_tokens():
                    raise InvariantError(3, "the end is told in the place of an earlier event")
                self._check_failure(answer)
                if self.request.detach_s is not None and is_own and answer.response_id:
                    return
        finally:
            self._response = None
        if not answer.is_finished:
            if self._circumstances.is_undisturbed():
                raise InvariantError(1, "the events end before the response does")
            raise StreamInterrupted("the events end", visible=False)

    async def _read(self, answer: ResponseChecker, response: HttpResponse) -> bytes:
        """The body of what was not refused."""
        self._response = response
        try:
            body = await response.read()
        finally:
            self._response = None
        if response.status == 200:
            return body
        code = msgspec.json.decode(body)["error"]["code"]
        if code == "response_not_found":
            raise ResponseForgotten
        self._raise_for_error(response.status, code, float(response.headers.get("retry-after", RETRY_S)), answer)
        raise AssertionError("a refusal is judged")

    def _begin_again(self, answer: ResponseChecker) -> None:
        """It was forgotten."""
        self._check_may_be_lost(answer)
        if self.request.cancel_at_s is not None or self.request.abort_at_s is not None:
            raise RequestRefused(404, "response_not_found")
        answer.restart()
        raise StreamInterrupted("404 response_not_found", visible=False)

    def _may_forget(self) -> bool:
        return self._circumstances.may_lose_records(is_background=self.request.background)

    def _check_may_be_lost(self, answer: ResponseChecker) -> None:
        if not self._may_forget():
            raise InvariantError(2, f"{answer.response_id} is forgotten")

    def _check_failure(self, answer: ResponseChecker) -> None:
        error = answer.error
        if error is not None:
            answer.restart()
            self._raise_for_error(_STATUSES.get(error["code"], 503), error["type"], RETRY_S, answer)

    def _check_refusal(self, refused: RequestRefused) -> str:
        """An aborted response is cancelled: it is no error, and it is not forgotten."""
        if refused.code in _OF_ABORTS and self._circumstances.is_undisturbed():
            raise InvariantError(2, f"{self.label} is told {refused.status} {refused.code}, and is not cancelled")
        return super()._check_refusal(refused)

    # It is not wanted any more.

    async def _abort(self) -> None:
        answer = self.checker
        assert isinstance(answer, ResponseChecker)
        response_id = answer.response_id
        await super()._abort()
        if not self._abort_found_it or response_id not in ("", answer.response_id):
            return
        # A router may hear of its end a moment after the instance has kept it as complete.
        answer.was_cancelled = not self._is_routed
        if response_id:
            await self._check_work_ends(response_id)

    async def _cancel(self) -> None:
        answer = self.checker
        assert isinstance(answer, ResponseChecker)
        while not answer.response_id:
            await asyncio.sleep(RETRY_S)
        response_id = answer.response_id
        self._web.ground.active_faults.trigger_counts["cancel"] += 1
        self._note(f"{self.label} is cancelled")
        told = await self._cancel_told(answer)
        if told.get("status") in ("queued", "in_progress") and self._circumstances.is_undisturbed():
            raise InvariantError(2, f"a cancel is answered with {told['status']}")
        if told.get("status") == "cancelled":
            answer.was_cancelled = answer.response_id == response_id
            await self._check_work_ends(response_id)

    async def _cancel_told(self, answer: ResponseChecker) -> dict[str, Any]:
        """Asked again until somebody answers; known or not."""
        for _ in range(MAX_TRIES):
            try:
                async with self._asked("POST", answer, "/cancel") as response:
                    told = msgspec.json.decode(await response.read())
                if response.status not in RETRYABLE:
                    return told
            except (aiohttp.ClientError, OSError, msgspec.MsgspecError):
                pass
            await asyncio.sleep(RETRY_S)
        return {}

    # It is over.

    async def _check_after_end(self, answer: ResponseChecker) -> None:
        """What has ended is there for a while, is the same however it is asked for, and nobody works on it."""
        assert answer.final is not None, "it has ended"
        if answer.final["status"] == "cancelled":
            await self._check_work_ends(answer.response_id)
        elif answer.was_cancelled and self._circumstances.is_undisturbed():
            raise InvariantError(2, f"it was cancelled, and is {answer.final['status']}")
        if self._has_left:
            return
        try:
            await self._chance.choice((self._poll, self._follow_on))(answer)
            if self._chance.happens(0.3):
                await self._delete(answer)
            elif len(self._urls) == 1 and not self._is_routed and self._chance.happens(0.15) and not self._may_pause():
                # Where a supervisor has paused for a minute, the rest of the run is too short for this.
                await self._wait_until_expired(answer)
        except ResponseForgotten:
            self._check_may_be_lost(answer)
        except (StreamInterrupted, aiohttp.ClientError, OSError):
            return  # it has what it wanted

    async def _check_work_ends(self, response_id: str) -> None:
        """Some time after it was cancelled."""
        await asyncio.sleep(WORK_ENDS_S)
        is_computed = self._circumstances.is_computed(response_id.removeprefix("resp_"))
        if self._circumstances.is_undisturbed() and is_computed:
            raise InvariantError(4, f"{response_id} was cancelled, and is computed")

    async def _delete(self, answer: ResponseChecker) -> None:
        async with self._asked("DELETE", answer) as response:
            await self._read(answer, response)
        self._note(f"{self.label} deletes {answer.response_id}")
        if len(self._urls) == 1:
            await self._check_gone(answer, "was deleted")

    async def _wait_until_expired(self, answer: ResponseChecker) -> None:
        await asyncio.sleep(RESPONSE_TTL_S * MAX_SLOW_CLOCK)
        await self._check_gone(answer, f"is kept for {RESPONSE_TTL_S:g} s")

    async def _check_gone(self, answer: ResponseChecker, why: str) -> None:
        async with self._asked("GET", answer) as response:
            await response.read()
            if response.status == 200 and self._circumstances.is_undisturbed():
                raise InvariantError(4, f"{answer.response_id} {why}, and is still there")
