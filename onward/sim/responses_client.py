"""A simulated client of `/v1/responses`.

It creates a response, disconnects, and retrieves the response by its id, from any event number on. It also cancels or
deletes the response, or waits until it has expired, and checks each reply.
"""

import asyncio
from collections.abc import Callable
from typing import Any

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
"""All work on a response ends within this time after a cancel, if no fault delays the cancel."""
_OF_ABORTS = ("aborted", "stream_unknown", "response_not_found")
_STATUSES = {"rate_limit_exceeded": 429, "invalid_prompt": 400}


class ResponseForgotten(Exception):
    """No process has a response with this id."""


class SimResponsesClient(SimClient):
    def _reply(self, history: list[dict[str, str]]) -> ReplyChecker:
        return ResponseChecker(self.request, self._prompt(history))

    def _body(self, history: list[dict[str, str]]) -> dict[str, Any]:
        return response_check.body_of(self.request)

    def _timed_actions(self) -> list[tuple[float, Callable[[], Any]]]:
        cancel_at_s = self.request.cancel_at_s
        return super()._timed_actions() + ([] if cancel_at_s is None else [(cancel_at_s, self._cancel)])

    async def _try(self, checker: ReplyChecker, body: dict[str, Any]) -> None:
        assert isinstance(checker, ResponseChecker)
        try:
            if not checker.response_id:
                await self._create(checker, body)
            while not checker.is_finished:
                if self._has_left:
                    raise StreamInterrupted("it has left", is_visible=False)
                await self._go_on(checker, body)
            await self._check_after_end(checker)
        except ResponseForgotten:
            self._begin_again(checker)
        except ConflictingEndError:
            if not self._may_forget():
                raise
        except (aiohttp.ClientError, OSError) as fault:
            raise StreamInterrupted(type(fault).__name__, is_visible=False) from None

    # Create.

    async def _create(self, checker: ResponseChecker, body: dict[str, Any]) -> None:
        checker.restart()
        headers = self._headers | {"X-Request-Id": self.label}
        request = self._session.post(
            self._pick_url() + response_check.PATH, data=msgspec.json.encode(body), headers=headers
        )
        async with request as response:
            if not self.request.is_streaming:
                await self._take_shown(checker, response)
            else:
                await self._follow(checker, response, is_own=True)
        if self.request.detach_s is not None:
            self._network.context.active_faults.trigger_counts["detach"] += 1
            self._note(f"{self.label} leaves {checker.response_id} to itself")
            await asyncio.sleep(self.request.detach_s)

    # Retrieve.

    async def _go_on(self, checker: ResponseChecker, body: dict[str, Any]) -> None:
        methods = [self._follow_on]
        if self.request.background:
            methods.append(self._poll)
        if checker.cursor:
            methods.append(lambda checker: self._follow_from_cursor(checker, body))
        await self._random.choice(methods)(checker)

    async def _poll(self, checker: ResponseChecker) -> None:
        async with self._request("GET", checker) as response:
            await self._take_shown(checker, response)
        if not checker.is_finished:
            await asyncio.sleep(POLL_S)

    async def _follow_on(self, checker: ResponseChecker) -> None:
        """Follows the events after the last received one, or after an earlier one."""
        last = len(checker.events) - 1
        after = last if self._random.happens(0.7) else self._random.randint(-1, last)
        checker.go_on_behind(after)
        query = "?stream=true" + (f"&starting_after={after}" if after >= 0 else "")
        async with self._request("GET", checker, query) as response:
            await self._follow(checker, response)

    async def _follow_from_cursor(self, checker: ResponseChecker, body: dict[str, Any]) -> None:
        checker.go_on_from_cursor()
        url, resume_headers = self._pick_url() + response_check.PATH, {"Last-Event-ID": checker.cursor}
        if self._random.happens(0.5):
            request = self._session.get(url, headers=tenants.auth_header(self.request.caller) | resume_headers)
        else:
            headers = self._headers | {"X-Request-Id": self.label} | resume_headers
            request = self._session.post(url, data=msgspec.json.encode(body), headers=headers)
        async with request as response:
            await self._follow(checker, response, is_own=True)

    def _request(self, method: str, checker: ResponseChecker, suffix: str = "") -> Any:
        url = f"{self._pick_url()}{response_check.PATH}/{checker.response_id}{suffix}"
        return self._session.request(method, url, headers=tenants.auth_header(self.request.caller))

    async def _take_shown(self, checker: ResponseChecker, response: HttpResponse) -> None:
        body = await self._read(checker, response)
        checker.take_whole(body)
        self._check_failure(checker)

    async def _follow(self, checker: ResponseChecker, response: HttpResponse, *, is_own: bool = False) -> None:
        """Reads events. `is_own` is set for the connection that creates the response or resumes it from a cursor; a
        client that detaches leaves only such a connection."""
        if response.status != 200:
            await self._read(checker, response)
        self._response = response
        try:
            async for event_id, data in events_of(response):
                checker.take_event(event_id, msgspec.json.decode(data))
                if checker.lost_events and not self._monitor.may_lose_tokens():
                    raise InvariantError(3, "the end is told in the place of an earlier event")
                self._check_failure(checker)
                if self.request.detach_s is not None and is_own and checker.response_id:
                    return
        finally:
            self._response = None
        if not checker.is_finished:
            if self._monitor.is_undisturbed():
                raise InvariantError(1, "the events end before the response does")
            raise StreamInterrupted("the events end", is_visible=False)

    async def _read(self, checker: ResponseChecker, response: HttpResponse) -> bytes:
        """Returns the body of a response with status 200, and raises for any other one."""
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
        self._raise_for_error(response.status, code, float(response.headers.get("retry-after", RETRY_S)), checker)
        raise AssertionError("a refusal is judged")

    def _begin_again(self, checker: ResponseChecker) -> None:
        """Handles a response that the server does not know any more. The client sends the request again, unless it may
        have been cancelled or aborted. Raises `InvariantError` if the record must not be lost."""
        self._check_may_be_lost(checker)
        if self.request.cancel_at_s is not None or self.request.abort_at_s is not None:
            raise RequestRefused(404, "response_not_found")
        checker.restart()
        raise StreamInterrupted("404 response_not_found", is_visible=False)

    def _may_forget(self) -> bool:
        return self._monitor.may_lose_records(is_background=self.request.background)

    def _check_may_be_lost(self, checker: ResponseChecker) -> None:
        if not self._may_forget():
            raise InvariantError(2, f"{checker.response_id} is forgotten")

    def _check_failure(self, checker: ResponseChecker) -> None:
        error = checker.error
        if error is not None:
            checker.restart()
            self._raise_for_error(_STATUSES.get(error["code"], 503), error["type"], RETRY_S, checker)

    def _check_refusal(self, refused: RequestRefused) -> str:
        """Raises if an abort in an undisturbed run ends in an error. An aborted response is cancelled, and it stays
        stored."""
        if refused.code in _OF_ABORTS and self._monitor.is_undisturbed():
            raise InvariantError(2, f"{self.label} is told {refused.status} {refused.code}, and is not cancelled")
        return super()._check_refusal(refused)

    # Abort and cancel.

    async def _abort(self) -> None:
        checker = self.checker
        assert isinstance(checker, ResponseChecker)
        response_id = checker.response_id
        await super()._abort()
        if not self._abort_found_it or response_id not in ("", checker.response_id):
            return
        # A router may learn of the end a moment after the instance has stored the response as complete.
        checker.was_cancelled = not self._is_routed
        if response_id:
            await self._check_work_ends(response_id)

    async def _cancel(self) -> None:
        checker = self.checker
        assert isinstance(checker, ResponseChecker)
        while not checker.response_id:
            await asyncio.sleep(RETRY_S)
        response_id = checker.response_id
        self._network.context.active_faults.trigger_counts["cancel"] += 1
        self._note(f"{self.label} is cancelled")
        reply = await self._send_cancel(checker)
        if reply.get("status") in ("queued", "in_progress") and self._monitor.is_undisturbed():
            raise InvariantError(2, f"a cancel is answered with {reply['status']}")
        if reply.get("status") == "cancelled":
            checker.was_cancelled = checker.response_id == response_id
            await self._check_work_ends(response_id)

    async def _send_cancel(self, checker: ResponseChecker) -> dict[str, Any]:
        """Sends a cancel until a server answers, whether or not it knows the response."""
        for _ in range(MAX_TRIES):
            try:
                async with self._request("POST", checker, "/cancel") as response:
                    reply = msgspec.json.decode(await response.read())
                if response.status not in RETRYABLE:
                    return reply
            except (aiohttp.ClientError, OSError, msgspec.MsgspecError):
                pass
            await asyncio.sleep(RETRY_S)
        return {}

    # After the end.

    async def _check_after_end(self, checker: ResponseChecker) -> None:
        """Checks that an ended response stays stored for a while, that it is the same however it is retrieved, and that
        no engine works on a cancelled one."""
        assert checker.final is not None, "it has ended"
        if checker.final["status"] == "cancelled":
            await self._check_work_ends(checker.response_id)
        elif checker.was_cancelled and self._monitor.is_undisturbed():
            raise InvariantError(2, f"it was cancelled, and is {checker.final['status']}")
        if self._has_left:
            return
        try:
            await self._random.choice((self._poll, self._follow_on))(checker)
            if self._random.happens(0.3):
                await self._delete(checker)
            elif (
                len(self._urls) == 1
                and not self._is_routed
                and self._random.happens(0.15)
                and not self._monitor.may_pause()
            ):
                # If a supervisor has paused for a minute, the rest of the run is too short for this.
                await self._wait_until_expired(checker)
        except ResponseForgotten:
            self._check_may_be_lost(checker)
        except (StreamInterrupted, aiohttp.ClientError, OSError):
            return  # the client has the whole response already

    async def _check_work_ends(self, response_id: str) -> None:
        """Checks that no engine works on a response some time after its cancel."""
        await asyncio.sleep(WORK_ENDS_S)
        is_computed = self._monitor.is_computed(response_id.removeprefix("resp_"))
        if self._monitor.is_undisturbed() and is_computed:
            raise InvariantError(4, f"{response_id} was cancelled, and is computed")

    async def _delete(self, checker: ResponseChecker) -> None:
        async with self._request("DELETE", checker) as response:
            await self._read(checker, response)
        self._note(f"{self.label} deletes {checker.response_id}")
        if len(self._urls) == 1:
            await self._check_gone(checker, "was deleted")

    async def _wait_until_expired(self, checker: ResponseChecker) -> None:
        await asyncio.sleep(RESPONSE_TTL_S * MAX_SLOW_CLOCK)
        await self._check_gone(checker, f"is kept for {RESPONSE_TTL_S:g} s")

    async def _check_gone(self, checker: ResponseChecker, reason: str) -> None:
        async with self._request("GET", checker) as response:
            await response.read()
            if response.status == 200 and self._monitor.is_undisturbed():
                raise InvariantError(4, f"{checker.response_id} {reason}, and is still there")
