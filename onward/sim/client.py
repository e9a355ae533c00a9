"""A simulated client: it sends requests, reads, aborts, disconnects and resumes, and checks all that it receives.

It does what a careful client of the real server does. It resumes an interrupted stream with the id of the last event,
and retries a request that was refused for now. Any other failure is a violation, unless the request or a fault permits
it.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from onward.proto.cursor import parse_cursor
from onward.sim import embedding_check, tenants
from onward.sim.completion_check import CompletionChecker
from onward.sim.http import SimHttpNetwork, SimHttpResponse, SimHttpSession
from onward.sim.invariants import InvariantMonitor
from onward.sim.oracle import STRUCTURES
from onward.sim.process import SimProcess
from onward.sim.reply_check import InvariantError, ReplyChecker
from onward.sim.scenario import SimRequest, common_fields
from onward.sim.vocabulary import DOOM, ENGINE_POISON, POISON
from onward.text.prompt_tokenizer import ChatMessage, PromptTokenizer

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
RETRY_S = 0.3
MAX_TRIES = 200
PATIENCE_S = 60.0
"""Limit on one try. After it the client tries another connection."""
RETRYABLE = frozenset({429, 502, 503})
FINAL = frozenset({"aborted", "deadline_exceeded", "crashed_worker", "crashed_engine", "invalid_logits"})
"""Error codes after which the client does not retry."""


class StreamInterrupted(Exception):
    """The connection was lost, or the server reports that it cannot continue. The client may retry."""

    def __init__(self, reason: str, pause_s: float = RETRY_S, is_visible: bool = True) -> None:
        super().__init__(reason)
        self.pause_s, self.is_visible = pause_s, is_visible


class RequestRefused(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


@dataclass(slots=True)
class ClientTotals:
    """Sums over all clients of a run."""

    num_requests: int = 0
    num_tokens: int = 0
    num_errors: int = 0
    end_reasons: Counter[str] = field(default_factory=Counter)


class SimClient:
    def __init__(
        self,
        network: SimHttpNetwork,
        process: SimProcess,
        request: SimRequest,
        urls: list[str],
        tokenizer: PromptTokenizer,
        totals: ClientTotals,
        monitor: InvariantMonitor,
        *,
        expects_calm: bool,
        is_routed: bool,
    ) -> None:
        """`monitor` knows which faults have taken effect. A real client does not know this, but the checks need it."""
        self.process, self.request = process, request
        self.is_over = False
        self.checker: ReplyChecker | None = None
        self.label, self.body = request.name, dict[str, Any]()
        """Label and body of the current request."""
        self._network, self._urls, self._tokenizer, self._totals = network, urls, tokenizer, totals
        self._monitor, self._note, self._is_routed = monitor, network.context.trace.note, is_routed
        self._may_miss_record = False
        """The current try could continue only from a stored record, and an instance that may have it was not
        reachable."""
        self._expects_calm = expects_calm
        """The client must not see any error, not even a retryable one."""
        self._session = SimHttpSession(network, process)
        self._response: SimHttpResponse | None = None
        self._has_left = False
        self._abort_found_it = False
        """A server has replied that it has aborted the request."""
        self._random = network.context.random.substream(f"visitor {request.name}")
        self._headers = _JSON | tenants.auth_header(request.caller)

    async def run(self) -> None:
        request = self.request
        await asyncio.sleep(request.at_s)
        history: list[dict[str, str]] = [{"role": "user", "content": request.prompt}]
        for turn in range(request.turns):
            self.label = request.name if request.turns == 1 else f"{request.name}.{turn + 1}"
            checker = await self._one_request(history)
            if checker is None:
                break
            history += [{"role": "assistant", "content": checker.text}, {"role": "user", "content": f"and {turn}?"}]
        self.is_over = True

    async def _one_request(self, history: list[dict[str, str]]) -> ReplyChecker | None:
        body = self.body = self._body(history)
        checker = self.checker = self._reply(history)
        self._totals.num_requests += 1
        tasks = self._start_timed_tasks()
        try:
            reason = await self._send_until_answered(checker, body)
        finally:
            for task in tasks:
                task.cancel()
        self._totals.end_reasons[reason] += 1
        self._totals.num_tokens += checker.num_tokens
        self._note(f"{self.label} ends: {reason}, {checker.num_tokens} tokens")
        return checker if reason == "complete" else None

    # Request bodies.

    def _reply(self, history: list[dict[str, str]]) -> ReplyChecker:
        if self.request.path == embedding_check.PATH:
            return embedding_check.EmbeddingChecker(
                self.request, [self._tokenizer.tokenize_text(text) for text in embedding_check.texts_of(self.request)]
            )
        return CompletionChecker(self.request, self._prompt(history))

    def _body(self, history: list[dict[str, str]]) -> dict[str, Any]:
        request = self.request
        if request.path == embedding_check.PATH:
            return embedding_check.body_of(request)
        body: dict[str, Any] = {
            "model": request.model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "stream": request.is_streaming,
        }
        optional = {
            "n": request.n if request.n > 1 else None,
            **common_fields(request),
            "stream_options": {"include_usage": True} if request.wants_usage and request.is_streaming else None,
        }
        body |= {name: value for name, value in optional.items() if value is not None}
        if request.structure:
            body |= STRUCTURES[request.structure].fields
        if request.path == CHAT:
            body["messages"] = history
            if request.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": request.logprobs}
            return body
        if request.logprobs is not None:
            body["logprobs"] = request.logprobs
        if request.path == "/v1/generate":
            return body | {"prompt_token_ids": self._prompt(history)}
        return body | {"prompt": request.prompt if request.prompt_token_ids is None else request.prompt_token_ids}

    def _prompt(self, history: list[dict[str, str]]) -> list[int]:
        request = self.request
        if request.path in (CHAT, RESPONSES, MESSAGES):
            messages = [ChatMessage(message["role"], message["content"]) for message in history]  # pyright: ignore[reportArgumentType]
            return self._tokenizer.tokenize_chat(messages, 0)
        return (
            self._tokenizer.tokenize_text(request.prompt)
            if request.prompt_token_ids is None
            else request.prompt_token_ids
        )

    # Actions while the client reads.

    def _start_timed_tasks(self) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._run_timed(at_s, action)) for at_s, action in self._timed_actions()]

    def _timed_actions(self) -> list[tuple[float, Callable[[], Any]]]:
        """Returns pairs of a time and an action."""
        request = self.request
        times: list[tuple[float, Callable[[], Any]]] = [(at_s, self._drop) for at_s in request.disconnect_at_s]
        if request.abort_at_s is not None:
            times.append((request.abort_at_s, self._abort))
        if request.leave_at_s is not None:
            times.append((request.leave_at_s, self._leave))
        return times

    async def _run_timed(self, at_s: float, action: Callable[[], Any]) -> None:
        await asyncio.sleep(at_s)
        try:
            await action()
        except InvariantError as wrong:
            asyncio.get_running_loop().call_exception_handler({"message": "beside reading", "exception": wrong})

    async def _drop(self) -> None:
        if self._response is not None:
            self._network.context.active_faults.trigger_counts["disconnect"] += 1
            self._note(f"{self.label} loses its connection")
            self._response.close()
            self._response.lose()

    async def _leave(self) -> None:
        self._has_left = True
        self._network.context.active_faults.trigger_counts["leave"] += 1
        self._note(f"{self.label} goes away")
        if self._response is not None:
            self._response.close()
            self._response.lose()

    async def _abort(self) -> None:
        """Sends an abort until a server answers, whether or not it knows the request."""
        self._network.context.active_faults.trigger_counts["abort"] += 1
        self._note(f"{self.label} is aborted")
        cursor = self.checker.cursor if self.checker is not None and self._random.happens(0.5) else ""
        name = parse_cursor(cursor).request_id if cursor else self.label
        body = msgspec.json.encode({"ids": [name]})
        for _ in range(MAX_TRIES):
            try:
                async with self._session.post(
                    self._pick_url() + "/v1/abort", data=body, headers=self._headers
                ) as response:
                    reply = msgspec.json.decode(await response.read())
                    self._abort_found_it = response.status == 200 and name in reply["aborted"]
                    return
            except (aiohttp.ClientError, OSError, msgspec.MsgspecError):
                await asyncio.sleep(RETRY_S)

    def _pick_url(self) -> str:
        return self._random.choice(self._urls)

    # One request with all its tries.

    async def _send_until_answered(self, checker: ReplyChecker, body: dict[str, Any]) -> str:
        for _ in range(MAX_TRIES):
            try:
                await asyncio.wait_for(self._try(checker, body), PATIENCE_S)
                if not checker.was_given_up:
                    checker.check_end()
                    return checker.outcome
                self._note(f"{self.label} was given up, and goes on by hand")
                body = body | checker.resume
                checker.continue_as_new_request()
            except StreamInterrupted as interruption:
                self._totals.num_errors += interruption.is_visible
                if interruption.is_visible and self._expects_calm:
                    raise InvariantError(2, f"{self.label} is told: {interruption}") from None
                self._note(f"{self.label} is cut off: {interruption}")
                if self._has_left:
                    return "left"
                if checker.was_given_up:
                    body = body | checker.resume_fields()
                    checker.continue_as_new_request()
                await asyncio.sleep(interruption.pause_s)
            except TimeoutError:
                if not self._monitor.may_pause():
                    raise InvariantError(6, f"{self.label} hears nothing for {PATIENCE_S:g} s") from None
                self._note(f"{self.label} hears nothing")
            except RequestRefused as refused:
                return self._check_refusal(refused)
        raise InvariantError(6, f"{self.label} was not answered in {MAX_TRIES} attempts")

    def _check_refusal(self, refused: RequestRefused) -> str:
        """Returns the error code. Raises `InvariantError` if the request may not end with it."""
        request, code = self.request, refused.code
        is_legal = (
            (code == "deadline_exceeded" and request.deadline_ms is not None)
            or (code == "aborted" and request.abort_at_s is not None)
            or (code == "stream_unknown" and request.abort_at_s is not None)
            or (code == "response_not_found" and (request.abort_at_s is not None or request.cancel_at_s is not None))
            or (code == "crashed_worker" and (POISON in request.prompt or self._monitor.may_crash()))
            or (code == "crashed_engine" and (ENGINE_POISON in request.prompt or self._monitor.may_crash_engine()))
            or (code == "invalid_logits" and DOOM in request.prompt)
            or (code == "context_length_exceeded" and request.turns > 1)
        )
        if code in _FAULTS:
            self._network.context.active_faults.trigger_counts[_FAULTS[code]] += 1
        if not is_legal:
            raise InvariantError(2, f"{self.label} is told {refused.status} {code}")
        return code

    async def _try(self, checker: ReplyChecker, body: dict[str, Any]) -> None:
        try:
            response = self._response = await self._send_request(checker, body)
            try:
                if response.status != 200:
                    await self._refusal(checker, response)
                elif self.request.is_streaming:
                    await self._read_stream(checker, response)
                else:
                    checker.take_whole(await response.read())
            finally:
                self._response = None
                if not response.at_eof():
                    response.close()
        except (aiohttp.ClientError, OSError) as fault:
            raise StreamInterrupted(type(fault).__name__, is_visible=False) from None

    async def _send_request(self, checker: ReplyChecker, body: dict[str, Any]) -> SimHttpResponse:
        headers = self._headers | {"X-Request-Id": self.label}
        url = self._pick_url() + self.request.path
        self._may_miss_record = False
        if not checker.cursor:
            checker.restart()
            return await self._session.post(url, data=msgspec.json.encode(body), headers=headers)
        checker.resume_at_cursor()
        if self._random.happens(0.5):
            was_out_of_reach = self._monitor.is_out_of_reach()
            resume_headers = tenants.auth_header(self.request.caller) | {"Last-Event-ID": checker.cursor}
            response = await self._session.get(url, headers=resume_headers)
            self._may_miss_record = response.status != 200 and (was_out_of_reach or self._monitor.is_out_of_reach())
            return response
        headers["Last-Event-ID"] = checker.cursor
        return await self._session.post(url, data=msgspec.json.encode(body), headers=headers)

    async def _refusal(self, checker: ReplyChecker, response: SimHttpResponse) -> None:
        body = msgspec.json.decode(await response.read())
        error = body["error"]
        if "partial" in body:
            checker.check_partial(body["partial"])
        self._raise_for_error(
            response.status, error["code"], float(response.headers.get("retry-after", RETRY_S)), checker
        )

    def _raise_for_error(self, status: int, code: str, pause_s: float, checker: ReplyChecker) -> None:
        if code not in FINAL and (status in RETRYABLE or code in ("label_in_use", "stale_attempt", "conflict")):
            is_promised = self._expects_calm and code == "unavailable" and self._may_miss_record
            is_owed = code in ("label_in_use", "conflict") or is_promised
            raise StreamInterrupted(f"{status} {code}", min(pause_s, 2.0), is_visible=not is_owed)
        if code == "stream_unknown" and checker.cursor and self.request.abort_at_s is None:
            raise StreamInterrupted(f"{status} {code}", is_visible=False)
        raise RequestRefused(status, code)

    async def _read_stream(self, checker: ReplyChecker, response: SimHttpResponse) -> None:
        is_done, error = False, None
        async for event_id, data in events_of(response):
            if is_done:
                raise InvariantError(1, "something follows [DONE]")
            if data == b"[DONE]":
                is_done = True
                continue
            if error is not None:
                raise InvariantError(1, "something follows an error")
            event = msgspec.json.decode(data)
            if "error" in event and "choices" not in event:
                error = event["error"]
                if "partial" in event:
                    checker.check_partial(event["partial"])
                continue
            checker.take_event(event_id, event)
            if self.request.reads_slowly:
                await asyncio.sleep(0.3)
        if not is_done:
            raise InvariantError(1, "the answer is complete, and its stream ends without [DONE]")
        if error is not None:
            self._raise_for_error(error.get("status") or error_status(error), error["code"], RETRY_S, checker)
        if not checker.is_finished and not checker.was_given_up:
            raise InvariantError(1, "[DONE] before every choice has ended")


def error_status(error: dict[str, Any]) -> int:
    """Returns the HTTP status of an error inside a stream, which may have none of its own."""
    return 503 if error.get("retryable") or error["type"] in ("overloaded_error", "server_error") else 400


async def events_of(response: SimHttpResponse) -> AsyncIterator[tuple[str | None, bytes]]:
    """Yields id and data of server-sent events. Drops an incomplete event at the end of a lost connection."""
    remainder = b""
    async for chunk in response.iter_any():
        *complete, remainder = (remainder + chunk).split(b"\n\n")
        for raw in complete:
            event_id, data = None, None
            for line in raw.split(b"\n"):
                name, _, value = line.partition(b": ")
                if name == b"id":
                    event_id = value.decode()
                elif name == b"data":
                    data = value
                elif name and name != b"event":
                    raise InvariantError(2, f"a line {line!r} in an event")
            if data is not None:
                yield event_id, data


_FAULTS = {"deadline_exceeded": "deadline", "invalid_logits": "doom"}
_JSON = {"content-type": "application/json"}
