"""Clients of `/v1/responses`, in every manner. One reads to the end, one hangs up and comes back by a number,
one follows a background response later, one polls it, and one cancels it.

Whatever a response must never do (a number twice or left out, another answer the second time, an event behind the last)
fails here at once. Two answers to one question are compared without the names of the requests.
"""

import asyncio
import random
import time
from typing import Any

import httpx
import msgspec

from tests.e2e.answers import (
    COME_BACK_PAUSE_S,
    COME_BACK_S,
    GREEDY,
    KEEP_LIST,
    LONG_LIST,
    MODEL,
    NOBODY_THERE,
    Ear,
    Question,
    seeded,
)
from tests.e2e.streams import TOPICS

PATH = "/v1/responses"
HANGS_UP, LEAVES, POLLS, CANCELS = "hangs up", "leaves", "polls", "cancels"
AGAIN_LATER = ("pd_preempted", "draining", "unavailable", "overloaded")
"""Why a response may have failed that a client could not keep waiting for."""
_MAX_HANG_UPS = 3
_OVER = ("completed", "incomplete", "failed", "cancelled")


class ResponseHearing(Ear):
    """One client's response, over all its connections."""

    def __init__(self) -> None:
        super().__init__()
        self.response_id: str | None = None
        self.events: list[dict[str, Any]] = []

    @property
    def is_over(self) -> bool:
        return bool(self.events) and self.events[-1]["type"].removeprefix("response.") in _OVER

    @property
    def error(self) -> dict[str, Any] | None:
        return self.events[-1]["response"]["error"] if self.is_over else None

    def hear(self, lines: list[str]) -> None:
        """One event, whole."""
        fields = dict(line.split(": ", 1) for line in lines if not line.startswith(":"))
        if not fields:
            return
        event = msgspec.json.decode(fields["data"])
        assert event["type"] == fields["event"]
        assert event["sequence_number"] == len(self.events), f"behind {len(self.events)} events comes {event}"
        assert not self.is_over, f"something comes behind the end: {event}"
        self.note()
        if "response" in event:
            assert self.response_id in (None, event["response"]["id"]), "a response has one id"
            self.response_id = event["response"]["id"]
        self.events.append(event)

    def begin_anew(self) -> None:
        self.response_id = None
        self.events.clear()


class ResponseClient:
    """`comes_back`: connections may break, and then it asks again."""

    def __init__(
        self, http: httpx.AsyncClient, question: Question, hearing: ResponseHearing, *, comes_back: bool
    ) -> None:
        self.num_returns = 0
        self._http, self._question, self._hearing, self._comes_back = http, question, hearing, comes_back
        self._deadline_s = time.monotonic() + COME_BACK_S
        self._chance = random.Random(question.body.get("cache_salt", ""))

    async def answer(self) -> dict[str, Any]:
        if self._question.manner in (POLLS, CANCELS):
            return await self._made_in_the_background()
        if not self._question.streams:
            return answer_of(await self._whole())
        await self._read()
        assert self._hearing.error is None, f"it has failed: {self._hearing.error}"
        return answer_of_events(self._hearing.events)

    # Streams.

    async def _read(self) -> None:
        hearing, num_hang_ups = self._hearing, 0
        while True:
            patience = self._patience(num_hang_ups)
            status = await self._listened(patience)
            if hearing.is_over and not self._may_begin_anew(status):
                return
            assert status in (200, 404, *NOBODY_THERE), f"refused with {status}"
            if status == 404 or hearing.is_over:
                assert self._may_begin_anew(status), f"{hearing.response_id} is forgotten"
                hearing.begin_anew()
            elif patience is None and status == 200:
                assert self._comes_back or self._is_following, "a stream ends without an end"
            num_hang_ups += patience is not None
            await self._pause()

    def _patience(self, num_hang_ups: int) -> int | None:
        """After how many events it hangs up; None: it does not."""
        if self._question.manner == LEAVES:
            return 1 if not num_hang_ups else None
        if self._question.manner == HANGS_UP and num_hang_ups < _MAX_HANG_UPS:
            return self._chance.randint(1, 12)
        return None

    def _may_begin_anew(self, status: int) -> bool:
        """What its client has left is computed by one instance, and may be lost with it or given up by it."""
        error = self._hearing.error
        was_lost = status == 404 or (error is not None and error["type"] in AGAIN_LATER)
        return was_lost and self._question.manner == HANGS_UP and not self._comes_back

    @property
    def _is_following(self) -> bool:
        return self._question.manner in (HANGS_UP, LEAVES)

    async def _listened(self, patience: int | None) -> int:
        """To one connection, as long as it holds or the client likes. Returns the status; 503: no connection was made."""
        try:
            return await self._listen(patience)
        except httpx.TransportError:
            if not (self._comes_back or (self._hearing.response_id is not None and self._is_following)):
                raise
            self.num_returns += 1
            return 503

    async def _listen(self, patience: int | None) -> int:
        hearing, lines = self._hearing, list[str]()
        num_before = len(hearing.events)
        async with self._stream() as response:
            if response.status_code != 200:
                await response.aread()
                return response.status_code
            async for line in response.aiter_lines():
                if line:
                    lines.append(line)
                    continue
                hearing.hear(lines)
                lines = []
                if patience is not None and len(hearing.events) - num_before >= patience:
                    break
        return 200

    def _stream(self) -> Any:
        hearing = self._hearing
        if hearing.response_id is None:
            return self._http.stream("POST", PATH, json=self._question.body)
        query = {"stream": "true"}
        if hearing.events:
            query["starting_after"] = str(len(hearing.events) - 1)
        return self._http.stream("GET", f"{PATH}/{hearing.response_id}", params=query)

    # What is asked for again and again.

    async def _whole(self) -> dict[str, Any]:
        response = await self._asked("POST", json=self._question.body)
        assert response is not None, "a whole answer was refused"
        return response

    async def _made_in_the_background(self) -> dict[str, Any]:
        begun = await self._whole()
        assert begun["status"] in ("queued", "in_progress"), begun["status"]
        self._hearing.response_id = begun["id"]
        while True:
            shown = await self._asked("GET", f"/{begun['id']}")
            assert shown is not None, f"{begun['id']} is forgotten"
            if shown["status"] in _OVER:
                assert shown["status"] != "failed", f"it has failed: {shown['error']}"
                return answer_of(shown)
            assert shown["status"] in ("queued", "in_progress"), shown["status"]
            if self._question.manner == CANCELS and shown["output"]:
                return await self._cancelled(begun["id"])
            await self._pause()

    async def _cancelled(self, response_id: str) -> dict[str, Any]:
        """A cancel that was cut off may have ended the response and found no process that stores it."""
        num_before = self.num_returns
        told = await self._asked("POST", f"/{response_id}/cancel")
        if told is None:
            assert self.num_returns > num_before, f"{response_id} was forgotten before it was cancelled"
            return {"status": "cancelled", "text": "", "usage": {"completion_tokens": 0}}
        again = await self._asked("GET", f"/{response_id}")
        assert again in (None, told), f"cancelled as {told}, shown as {again}"
        assert told["status"] == "cancelled", told["status"]
        return {"status": "cancelled", "text": text_of(told), "usage": _usage_of(told)}

    async def _asked(self, method: str, path: str = "", **more: Any) -> dict[str, Any] | None:
        """None: there is no such response."""
        while True:
            try:
                response = await self._http.request(method, PATH + path, **more)
                if response.status_code == 404:
                    return None
                if response.status_code == 200:
                    return response.json()
                is_late = bool(path) or self._comes_back
                assert is_late and response.status_code in NOBODY_THERE, f"{response.status_code}: {response.text}"
            except httpx.TransportError:
                if not self._comes_back:
                    raise
            self.num_returns += 1
            await self._pause()

    async def _pause(self) -> None:
        assert time.monotonic() < self._deadline_s, f"nobody answers {self._question.name}"
        await asyncio.sleep(COME_BACK_PAUSE_S)


def answer_of_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    last = events[-1]["response"]
    return {"events": nameless(events, last["id"]), "usage": _usage_of(last)}


def answer_of(response: dict[str, Any]) -> dict[str, Any]:
    return {"response": nameless(response, response["id"]), "usage": _usage_of(response)}


def nameless(told: Any, response_id: str) -> Any:
    """All but what names this one request, and what was found in a cache."""
    if isinstance(told, list):
        return [nameless(one, response_id) for one in told]
    if isinstance(told, dict):
        passing = ("created_at", "completed_at", "input_tokens_details", "call_id")
        return {key: nameless(value, response_id) for key, value in told.items() if key not in passing}
    return told.replace(response_id.removeprefix("resp_"), "") if isinstance(told, str) else told


def agrees(answer: dict[str, Any], undisturbed: dict[str, Any]) -> bool:
    """The same; or as much of it as there was when its client wanted no more."""
    if answer.get("status") != "cancelled":
        return answer == undisturbed
    whole = text_of(undisturbed["response"])
    return whole.startswith(answer["text"]) or answer["text"].startswith(whole)


def text_of(response: dict[str, Any]) -> str:
    parts = [part for item in response["output"] for part in item.get("content", [])]
    return "".join(part["text"] for part in parts)


def _usage_of(response: dict[str, Any]) -> dict[str, int]:
    return {"completion_tokens": (response["usage"] or {"output_tokens": 0})["output_tokens"]}


def response(name: str, number: int, max_tokens: int, manner: str = "", **more: Any) -> Question:
    text = f"{number}. Say what {TOPICS[number % len(TOPICS)]} are good for, and who was the first to say so."
    body = {"model": MODEL, "input": text, "max_output_tokens": max_tokens, "ignore_eos": True}
    return Question(name, PATH, body | more, manner)


def undisturbed(question: Question, max_tokens: int) -> Question:
    """Returns the same question without hanging up or cancelling."""
    if question.manner == CANCELS:
        return question._replace(manner=POLLS, body=question.body | {"max_output_tokens": max_tokens})
    return question._replace(manner="") if question.manner == HANGS_UP else question


def response_questions(max_tokens: int) -> list[Question]:
    """In every manner. What is cancelled would take so long that it must have been."""
    streamed, background = {"stream": True}, {"background": True}
    scored = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    schema = {"text": {"format": {"type": "json_schema", "name": "rows", "schema": LONG_LIST}}}
    call = {"tools": [{"type": "function", **KEEP_LIST["function"]}], "tool_choice": "required"}
    return [
        response("responses, streamed", 22, max_tokens, **GREEDY, **streamed),
        response("responses, schema", 23, max_tokens, **schema, **seeded(25)),
        response("responses, streamed, a call", 24, max_tokens, **call, **seeded(26), **streamed),
        response("responses, streamed, cut", 25, max_tokens, HANGS_UP, **seeded(27), **streamed),
        response("responses, streamed, logprobs, cut", 26, max_tokens, HANGS_UP, **scored, **GREEDY, **streamed),
        response("responses, background", 27, max_tokens, POLLS, **seeded(28), **background),
        response("responses, background, followed", 28, max_tokens, LEAVES, **GREEDY, **streamed, **background),
        response("responses, background, cancelled", 29, 32 * max_tokens, CANCELS, **seeded(29), **background),
    ]
