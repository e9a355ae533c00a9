"""A client of a simulation: asks, reads, aborts, leaves, comes back for the rest; and knows what it may be told.

It does what a careful client of the real server does: what was cut off is continued with the last event's id, what was
refused for now is tried again later, and anything else is a violation.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from onward.proto.cursor import parse_cursor
from onward.sim import embedding_check, tenants
from onward.sim.common_fields import common_fields
from onward.sim.completion_check import CompletionChecker
from onward.sim.http import SimHttpNetwork, SimHttpResponse, SimHttpSession
from onward.sim.output_structures import STRUCTURES
from onward.sim.process import SimProcess
from onward.sim.reply_check import InvariantError, ReplyChecker
from onward.sim.scenario import SimRequest
from onward.sim.vocabulary import DOOM, ENGINE_POISON, POISON
from onward.text.prompt_tokenizer import ChatMessage, PromptTokenizer

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
RETRY_S = 0.3
MAX_TRIES = 200
PATIENCE_S = 60.0
"""For one connection that says nothing: then the client tries another."""
RETRYABLE = frozenset({429, 502, 503})
FINAL = frozenset({"aborted", "deadline_exceeded", "crashed_worker", "crashed_engine", "invalid_logits"})
"""Codes of errors after which nobody tries again."""


class StreamInterrupted(Exception):
    """The connection was lost, or the server says that it cannot go on: the client may try again."""

    def __init__(self, why: str, pause_s: float = RETRY_S, visible: bool = True) -> None:
        super().__init__(why)
        self.pause_s, self.is_visible = pause_s, visible


class RequestRefused(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


@dataclass(slots=True)
class ClientTotals:
    """What all visitors together have seen."""

    num_requests: int = 0
    num_tokens: int = 0
    num_errors: int = 0
    ends: dict[str, int] | None = None

    def end(self, reason: str) -> None:
        self.ends = self.ends or {}
        self.ends[reason] = self.ends.get(reason, 0) + 1


class SimClient:
    def __init__(
        self,
        web: SimHttpNetwork,
        process: SimProcess,
        ask: SimRequest,
        doors: list[str],
        tokens: PromptTokenizer,
        books: ClientTotals,
        note: Callable[[str], None],
        may_crash: Callable[[], bool],
        may_crash_engine: Callable[[], bool],
        may_pause: Callable[[], bool],
        is_out_of_reach: Callable[[], bool],
        *,
        expects_calm: bool = False,
    ) -> None:
        self.process, self.request = process, ask
        self.is_over = False
        self.checker: ReplyChecker | None = None
        self.label, self.body = ask.name, dict[str, Any]()
        """Of the request under way."""
        self._web, self._urls, self._tokens, self._totals = web, doors, tokens, books
        self._note, self._may_crash, self._may_pause = note, may_crash, may_pause
        self._may_crash_engine, self._is_out_of_reach = may_crash_engine, is_out_of_reach
        self._may_miss_record = False
        """The request under way can only go on from a record, and an instance that may have it could not be asked."""
        self._expects_calm = expects_calm
        """No error is good enough, also none after which one may try again."""
        self._session = SimHttpSession(web, process)
        self._response: SimHttpResponse | None = None
        self._has_left = False
        self._abort_found_it = False
        """A server has said that it has aborted the request."""
        self._chance = web.ground.random.substream(f"visitor {ask.name}")
        self._headers = _JSON | tenants.auth_header(ask.caller)

    async def run(self) -> None:
        ask = self.request
        await asyncio.sleep(ask.at_s)
        history: list[dict[str, str]] = [{"role": "user", "content": ask.prompt}]
        for turn in range(ask.turns):
            self.label = ask.name if ask.turns == 1 else f"{ask.name}.{turn + 1}"
            answer = await self._one_request(history)
            if answer is None:
                break
            history += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": f"and {turn}?"}]
        self.is_over = True

    async def _one_request(self, history: list[dict[str, str]]) -> ReplyChecker | None:
        body = self.body = self._body(history)
        answer = self.checker = self._reply(history)
        self._totals.num_requests += 1
        asides = self._start_asides()
        try:
            reason = await self._answered(answer, body)
        finally:
            for aside in asides:
                aside.cancel()
        self._totals.end(reason)
        self._totals.num_tokens += answer.num_tokens
        self._note(f"{self.label} ends: {reason}, {answer.num_tokens} tokens")
        return answer if reason == "complete" else None

    # What it asks.

    def _reply(self, history: list[dict[str, str]]) -> ReplyChecker:
        if self.request.path == embedding_check.PATH:
            return embedding_check.EmbeddingChecker(
                self.request, [self._tokens.tokenize_text(text) for text in embedding_check.texts_of(self.request)]
            )
        return CompletionChecker(self.request, self._prompt(history))

    def _body(self, history: list[dict[str, str]]) -> dict[str, Any]:
        ask = self.request
        if ask.path == embedding_check.PATH:
            return embedding_check.body_of(ask)
        body: dict[str, Any] = {
            "model": "hash",
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "stream": ask.is_streaming,
        }
        optional = {
            "n": ask.n if ask.n > 1 else None,
            **common_fields(ask),
            "stream_options": {"include_usage": True} if ask.wants_usage and ask.is_streaming else None,
        }
        body |= {name: value for name, value in optional.items() if value is not None}
        if ask.structure:
            body |= STRUCTURES[ask.structure].fields
        if ask.path == CHAT:
            body["messages"] = history
            if ask.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": ask.logprobs}
            return body
        if ask.logprobs is not None:
            body["logprobs"] = ask.logprobs
        if ask.path == "/v1/generate":
            return body | {"prompt_token_ids": self._prompt(history)}
        return body | {"prompt": ask.prompt if ask.prompt_token_ids is None else ask.prompt_token_ids}

    def _prompt(self, history: list[dict[str, str]]) -> list[int]:
        ask = self.request
        if ask.path in (CHAT, RESPONSES):
            return self._tokens.tokenize_chat([ChatMessage(one["role"], one["content"]) for one in history], 0)  # pyright: ignore[reportArgumentType]
        return self._tokens.tokenize_text(ask.prompt) if ask.prompt_token_ids is None else ask.prompt_token_ids

    # What it does beside reading.

    def _start_asides(self) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._aside(at_s, act)) for at_s, act in self._timed_actions()]

    def _timed_actions(self) -> list[tuple[float, Callable[[], Any]]]:
        """When, and what."""
        ask = self.request
        times: list[tuple[float, Callable[[], Any]]] = [(at_s, self._drop) for at_s in ask.disconnect_at_s]
        if ask.abort_at_s is not None:
            times.append((ask.abort_at_s, self._abort))
        if ask.leave_at_s is not None:
            times.append((ask.leave_at_s, self._leave))
        return times

    async def _aside(self, at_s: float, act: Callable[[], Any]) -> None:
        await asyncio.sleep(at_s)
        try:
            await act()
        except InvariantError as wrong:
            asyncio.get_running_loop().call_exception_handler({"message": "beside reading", "exception": wrong})

    async def _drop(self) -> None:
        if self._response is not None:
            self._web.ground.active_faults.trigger_counts["disconnect"] += 1
            self._note(f"{self.label} loses its connection")
            self._response.close()
            self._response.lose()

    async def _leave(self) -> None:
        self._has_left = True
        self._web.ground.active_faults.trigger_counts["leave"] += 1
        self._note(f"{self.label} goes away")
        if self._response is not None:
            self._response.close()
            self._response.lose()

    async def _abort(self) -> None:
        """Asked again until somebody answers; known or not."""
        self._web.ground.active_faults.trigger_counts["abort"] += 1
        self._note(f"{self.label} is aborted")
        cursor = self.checker.cursor if self.checker is not None and self._chance.happens(0.5) else ""
        name = parse_cursor(cursor).request_id if cursor else self.label
        body = msgspec.json.encode({"ids": [name]})
        for _ in range(MAX_TRIES):
            try:
                async with self._session.post(
                    self._pick_url() + "/v1/abort", data=body, headers=self._headers
                ) as response:
                    told = msgspec.json.decode(await response.read())
                    self._abort_found_it = response.status == 200 and name in told["aborted"]
                    return
            except (aiohttp.ClientError, OSError, msgspec.MsgspecError):
                await asyncio.sleep(RETRY_S)

    def _pick_url(self) -> str:
        return self._chance.choice(self._urls)

    # One request, however often it has to be sent.

    async def _answered(self, answer: ReplyChecker, body: dict[str, Any]) -> str:
        for _ in range(MAX_TRIES):
            try:
                await asyncio.wait_for(self._try(answer, body), PATIENCE_S)
                if not answer.was_given_up:
                    answer.check_end()
                    return answer.outcome
                self._note(f"{self.label} was given up, and goes on by hand")
                body = body | answer.resume
                answer.continue_as_new_request()
            except StreamInterrupted as why:
                self._totals.num_errors += why.is_visible
                if why.is_visible and self._expects_calm:
                    raise InvariantError(2, f"{self.label} is told: {why}") from None
                self._note(f"{self.label} is cut off: {why}")
                if self._has_left:
                    return "left"
                if answer.was_given_up:
                    body = body | answer.resume_fields()
                    answer.continue_as_new_request()
                await asyncio.sleep(why.pause_s)
            except TimeoutError:
                if not self._may_pause():
                    raise InvariantError(6, f"{self.label} hears nothing for {PATIENCE_S:g} s") from None
                self._note(f"{self.label} hears nothing")
            except RequestRefused as why:
                return self._check_refusal(why)
        raise InvariantError(6, f"{self.label} was not answered in {MAX_TRIES} attempts")

    def _check_refusal(self, refused: RequestRefused) -> str:
        """Whether it may end so."""
        ask, code = self.request, refused.code
        is_legal = (
            (code == "deadline_exceeded" and ask.deadline_ms is not None)
            or (code == "aborted" and ask.abort_at_s is not None)
            or (code == "stream_unknown" and ask.abort_at_s is not None)
            or (code == "response_not_found" and (ask.abort_at_s is not None or ask.cancel_at_s is not None))
            or (code == "crashed_worker" and (POISON in ask.prompt or self._may_crash()))
            or (code == "crashed_engine" and (ENGINE_POISON in ask.prompt or self._may_crash_engine()))
            or (code == "invalid_logits" and DOOM in ask.prompt)
            or (code == "context_length_exceeded" and ask.turns > 1)
        )
        if code in _FAULTS:
            self._web.ground.active_faults.trigger_counts[_FAULTS[code]] += 1
        if not is_legal:
            raise InvariantError(2, f"{self.label} is told {refused.status} {code}")
        return code

    async def _try(self, answer: ReplyChecker, body: dict[str, Any]) -> None:
        try:
            response = self._response = await self._sent(answer, body)
            try:
                if response.status != 200:
                    await self._refusal(answer, response)
                elif self.request.is_streaming:
                    await self._read_stream(answer, response)
                else:
                    answer.take_whole(await response.read())
            finally:
                self._response = None
                if not response.at_eof():
                    response.close()
        except (aiohttp.ClientError, OSError) as fault:
            raise StreamInterrupted(type(fault).__name__, visible=False) from None

    async def _sent(self, answer: ReplyChecker, body: dict[str, Any]) -> SimHttpResponse:
        headers = self._headers | {"X-Request-Id": self.label}
        url = self._pick_url() + self.request.path
        self._may_miss_record = False
        if not answer.cursor:
            answer.restart()
        elif self._chance.happens(0.5):
            was_out_of_reach = self._is_out_of_reach()
            place = tenants.auth_header(self.request.caller) | {"Last-Event-ID": answer.cursor}
            response = await self._session.get(url, headers=place)
            self._may_miss_record = response.status != 200 and (was_out_of_reach or self._is_out_of_reach())
            return response
        else:
            headers["Last-Event-ID"] = answer.cursor
        return await self._session.post(url, data=msgspec.json.encode(body), headers=headers)

    async def _refusal(self, answer: ReplyChecker, response: SimHttpResponse) -> None:
        body = msgspec.json.decode(await response.read())
        told = body["error"]
        if "partial" in body:
            answer.check_partial(body["partial"])
        self._raise_for_error(
            response.status, told["code"], float(response.headers.get("retry-after", RETRY_S)), answer
        )

    def _raise_for_error(self, status: int, code: str, pause_s: float, answer: ReplyChecker) -> None:
        if code not in FINAL and (status in RETRYABLE or code in ("label_in_use", "stale_attempt", "conflict")):
            is_promised = self._expects_calm and code == "unavailable" and self._may_miss_record
            is_owed = code in ("label_in_use", "conflict") or is_promised
            raise StreamInterrupted(f"{status} {code}", min(pause_s, 2.0), visible=not is_owed)
        if code == "stream_unknown" and answer.cursor and self.request.abort_at_s is None:
            raise StreamInterrupted(f"{status} {code}", visible=False)
        raise RequestRefused(status, code)

    async def _read_stream(self, answer: ReplyChecker, response: SimHttpResponse) -> None:
        is_done, error = False, None
        async for event_id, data in events_of(response):
            if is_done:
                raise InvariantError(1, "something follows [DONE]")
            if data == b"[DONE]":
                is_done = True
                continue
            if error is not None:
                raise InvariantError(1, "something follows an error")
            told = msgspec.json.decode(data)
            if "error" in told and "choices" not in told:
                error = told["error"]
                if "partial" in told:
                    answer.check_partial(told["partial"])
                continue
            answer.take_event(event_id, told)
            if self.request.reads_slowly:
                await asyncio.sleep(0.3)
        if not is_done:
            raise InvariantError(1, "the answer is complete, and its stream ends without [DONE]")
        if error is not None:
            self._raise_for_error(error.get("status") or _status(error), error["code"], RETRY_S, answer)
        if not answer.is_finished and not answer.was_given_up:
            raise InvariantError(1, "[DONE] before every choice has ended")


def _status(error: dict[str, Any]) -> int:
    """Of an error inside a stream, which has none of its own."""
    return 503 if error.get("retryable") or error["type"] in ("overloaded_error", "server_error") else 400


async def events_of(response: SimHttpResponse) -> AsyncIterator[tuple[str | None, bytes]]:
    """Server-sent events; half an event at the end of a lost connection is none."""
    rest = b""
    async for chunk in response.iter_any():
        *whole, rest = (rest + chunk).split(b"\n\n")
        for raw in whole:
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
