"""Questions of every kind, and their answers as a careful client hears them: in a form that two runs can be compared in.

A client that streams counts an event once its blank line has come, and comes back with `Last-Event-ID` where it is told
to. Whatever a stream must never do (two ends, an event after the end, a place counted twice) fails here at once.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
import msgspec

from onward.proto.cursor import parse_cursor
from tests.e2e.streams import TOPICS

MODEL = "smollm2-135m-instruct"
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/v1/generate"
COME_BACK_S = 200.0
COME_BACK_PAUSE_S = 0.1
NOBODY_THERE = (429, 502, 503)


class Question(NamedTuple):
    name: str
    path: str
    body: dict[str, Any]
    manner: str = ""
    """In which its client has it answered, where there are several."""

    @property
    def streams(self) -> bool:
        return self.body.get("stream", False)

    def salted(self, salt: str) -> "Question":
        """Returns the same question with a prompt that is not cached anywhere. The answer is the same."""
        return self._replace(body=self.body | {"cache_salt": salt})


@dataclass
class Choice:
    said: str = ""
    token_ids: list[int] = field(default_factory=list)
    """By the cursors."""
    shown_token_ids: list[int] = field(default_factory=list)
    """Where the answer itself has them."""
    completion_token_ids: list[int] | None = None
    """The tokens of a choice that was given up."""
    logprobs: list[Any] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    num_openings: int = 0
    calls: list[dict[str, str]] = field(default_factory=list)
    """Calls of tools, by name, with their arguments."""


class Ear:
    """How long it was silent."""

    def __init__(self) -> None:
        self.longest_silence_s = 0.0
        self.last_event_s = time.monotonic()

    def note(self) -> None:
        now_s = time.monotonic()
        self.longest_silence_s = max(self.longest_silence_s, now_s - self.last_event_s)
        self.last_event_s = now_s


class Hearing(Ear):
    """One client's stream, over all its connections."""

    def __init__(self, given: list[int] | None = None) -> None:
        """`given`: tokens of the only choice that were sent along with the request."""
        super().__init__()
        self.choices: dict[int, Choice] = {} if given is None else {0: Choice(token_ids=list(given))}
        self.usages: list[dict[str, Any]] = []
        self.heads: set[tuple[str, int, str, str]] = set()
        self.place: str | None = None
        self.error: dict[str, Any] | None = None
        self.beside: dict[str, Any] = {}
        """`seed` and `resume` of a stream that was given up."""
        self.done = False
        self.is_open = False
        """The connection it comes by."""

    def hear(self, lines: list[str]) -> None:
        """One event, whole."""
        fields = dict(line.split(": ", 1) for line in lines if not line.startswith(":"))
        if not fields:
            return
        assert not self.done, f"something comes after [DONE]: {lines}"
        self.note()
        if place := fields.get("id"):
            self._advance(place)
        if fields["data"] == "[DONE]":
            self.done = True
        elif fields.get("event") == "error":
            assert self.error is None, "one error is enough"
            self.error = msgspec.json.decode(fields["data"])["error"]
        else:
            self._take(msgspec.json.decode(fields["data"]))

    def _advance(self, place: str) -> None:
        cursor = parse_cursor(place)
        for index, token_ids in cursor.new_tokens.items():
            self._choice(index).token_ids += token_ids
        for index, told in enumerate(cursor.choices):
            assert told.position == len(self._choice(index).token_ids), f"{place} does not count every token once"
        self.place = place

    def _choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice())

    def _take(self, chunk: dict[str, Any]) -> None:
        assert not self.usages, f"something comes after the usage: {chunk}"
        self.heads.add((chunk["id"], chunk["created"], chunk["model"], chunk["object"]))
        self.usages += [usage] if (usage := chunk.get("usage")) else []
        self.beside |= {key: chunk[key] for key in ("seed", "resume") if key in chunk}
        for choice in chunk["choices"]:
            self._take_choice(self._choice(choice["index"]), choice)

    def _take_choice(self, heard: Choice, choice: dict[str, Any]) -> None:
        assert not heard.finish_reasons, "a choice goes on after its end"
        delta = choice.get("delta", {})
        heard.num_openings += "role" in delta
        heard.said += delta.get("content") or choice.get("text") or ""
        for call in delta.get("tool_calls") or []:
            _take_call(heard.calls, call)
        heard.shown_token_ids += choice.get("token_ids", [])
        heard.completion_token_ids = choice.get("completion_token_ids")
        heard.logprobs += _listed(choice.get("logprobs"))
        heard.finish_reasons += [reason] if (reason := choice["finish_reason"]) else []

    def lose_connection(self) -> None:
        """What came without a place will be told again."""
        self.is_open = False
        self.usages.clear()
        if self.place is None:
            self.choices.clear()
            self.heads.clear()

    def answer(self) -> dict[str, Any]:
        assert self.error is None, f"an error instead of an end: {self.error}"
        assert self.done, "no [DONE]"
        assert len(self.heads) == 1, f"one id, one date: {self.heads}"
        [usage] = self.usages
        [(_, _, model, kind)] = self.heads
        choices = [msgspec.to_builtins(self.choices[index]) for index in sorted(self.choices)]
        assert all(len(choice["finish_reasons"]) == 1 for choice in choices), "each choice ends once"
        return {"model": model, "object": kind, "choices": choices, "usage": _lasting(usage)}


def _take_call(calls: list[dict[str, str]], told: dict[str, Any]) -> None:
    function = told["function"]
    if told["index"] == len(calls):
        calls.append({"name": function["name"], "arguments": ""})
    else:
        assert told["index"] == len(calls) - 1, f"a call goes on after the next has begun: {told}"
        assert "id" not in told, f"a call begins twice: {told}"
    calls[-1]["arguments"] += function.get("arguments", "")


def _listed(logprobs: Any) -> list[Any]:
    """Token by token, whichever form they have."""
    if not logprobs:
        return []
    if isinstance(logprobs, list):
        return logprobs
    if "content" in logprobs:
        return logprobs["content"]
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return [list(row) for row in zip(*(logprobs[column] for column in columns), strict=True)]


def _lasting(usage: dict[str, Any]) -> dict[str, Any]:
    """What was found in a cache is another matter each time."""
    return {key: value for key, value in usage.items() if key != "prompt_tokens_details"}


def whole_answer(body: dict[str, Any]) -> dict[str, Any]:
    """All but what names this one request."""
    if body.get("type") == "message":
        return message_answer(body)
    choices = [_nameless(choice) for choice in body["choices"]]
    lasting = {key: value for key, value in body.items() if key not in ("id", "created")}
    return lasting | {"choices": choices, "usage": _lasting(body["usage"])}


def message_answer(message: dict[str, Any]) -> dict[str, Any]:
    """A message of `/v1/messages`, without its id, those of its calls, and what was found in a cache."""
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    stop = {key: message[key] for key in ("stop_reason", "stop_sequence")}
    return {"content": content, **stop, "usage": {"completion_tokens": message["usage"]["output_tokens"]}}


def _nameless(choice: dict[str, Any]) -> dict[str, Any]:
    """Ids of calls are made of the request's."""
    message = choice.get("message", {})
    if not message.get("tool_calls"):
        return choice
    calls = [{key: value for key, value in call.items() if key != "id"} for call in message["tool_calls"]]
    return choice | {"message": message | {"tool_calls": calls}}


def num_tokens(answer: dict[str, Any]) -> int:
    return answer["usage"]["completion_tokens"]


async def ask(client: httpx.AsyncClient, question: Question, hearing: Hearing | None = None) -> dict[str, Any]:
    """By one connection."""
    if question.streams:
        hearing = hearing or Hearing()
        status = await listen(client, "POST", question, hearing)
        assert status == 200, f"refused with {status}"
        return hearing.answer()
    response = await client.post(question.path, json=question.body)
    assert response.status_code == 200, f"{response.status_code}: {response.text[:500]}"
    return whole_answer(response.json())


async def listen(client: httpx.AsyncClient, method: str, question: Question, hearing: Hearing) -> int:
    """As long as the connection holds. Returns the status."""
    headers = {"Last-Event-ID": hearing.place} if hearing.place else {}
    content = {"json": question.body} if method == "POST" else {}
    async with client.stream(method, question.path, headers=headers, **content) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode()
            refusable = NOBODY_THERE + ((404,) if method == "GET" else ())
            assert response.status_code in refusable, f"{response.status_code}: {text[:500]}"
            return response.status_code
        hearing.is_open = True
        lines: list[str] = []
        async for line in response.aiter_lines():
            if line:
                lines.append(line)
            else:
                hearing.hear(lines)
                lines = []
    return 200


async def ask_again_and_again(
    client: httpx.AsyncClient, question: Question, hearing: Hearing
) -> tuple[dict[str, Any], int]:
    """Where connections may break: comes back until the answer is whole. Returns how often it had to, too."""
    num_returns = 0
    deadline_s = time.monotonic() + COME_BACK_S
    method = "POST"
    while True:
        try:
            if not question.streams:
                return await ask(client, question), num_returns
            status = await listen(client, method, question, hearing)
            if hearing.done and hearing.error is None:
                return hearing.answer(), num_returns
            # No process has the stream any more: it is made again, from the seed in the cursor, up to the place.
            method = "POST" if status == 404 or hearing.place is None else "GET"
            assert status != 200, f"the stream ended without an end: {hearing.error}"
        except httpx.TransportError:
            num_returns += hearing.is_open
            method = "GET" if hearing.place else "POST"
        assert time.monotonic() < deadline_s, f"nobody takes {question.name} up again"
        hearing.lose_connection()
        await asyncio.sleep(COME_BACK_PAUSE_S)


USAGE = {"stream": True, "stream_options": {"include_usage": True}}
GREEDY: dict[str, Any] = {"temperature": 0.0}
PENALTIES = {"presence_penalty": 0.6, "frequency_penalty": 0.4}


def seeded(seed: int) -> dict[str, Any]:
    return {"temperature": 0.9, "top_p": 0.95, "seed": seed}


def chat(name: str, number: int, max_tokens: int, **more: Any) -> Question:
    topic = TOPICS[number % len(TOPICS)]
    text = f"{number}. Tell me something about {topic}, and why it matters to people who live near the sea."
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True}
    return Question(name, CHAT, body | more)


def completion(name: str, number: int, max_tokens: int, **more: Any) -> Question:
    prompt = f"{number}. A short history of {TOPICS[number % len(TOPICS)]} begins with"
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return Question(name, COMPLETIONS, body | more)


def generate(name: str, number: int, max_tokens: int, **more: Any) -> Question:
    prompt = [(number * 7919 + i * 104729) % 40000 + 100 for i in range(200)]
    body = {"model": MODEL, "prompt_token_ids": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return Question(name, GENERATE, body | more)


LONG_LIST = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "year": {"type": "integer", "maximum": 2030}},
        "required": ["name", "year"],
        "additionalProperties": False,
    },
    "minItems": 500,
}
"""Which no answer comes to the end of."""
KEEP_LIST = {
    "type": "function",
    "function": {
        "name": "keep_list",
        "parameters": {"type": "object", "properties": {"rows": LONG_LIST}, "required": ["rows"]},
    },
}
FORCED_CALL: dict[str, Any] = {"tools": [KEEP_LIST], "tool_choice": "required"}
LONG_LINES = "([A-Z][a-z ,]{8,40}[.]\\n){500}"


def questions(max_tokens: int) -> list[Question]:
    """Every kind of request that a router must resume."""
    whole_page = [{"role": "user", "content": " and ".join(f"{topic} {i}" for i in range(8) for topic in TOPICS)}]
    logprobs = {"logprobs": True, "top_logprobs": 2}
    stop = {"stop": [" cruelty", " century"]}
    return [
        chat("chat, streamed", 1, max_tokens, **GREEDY, **USAGE),
        chat("chat, streamed, seeded", 2, max_tokens, **seeded(11), **USAGE),
        chat("chat", 3, max_tokens, **GREEDY),
        chat("chat, seeded", 4, max_tokens, **seeded(12)),
        chat("chat, streamed, long prompt", 5, max_tokens, messages=whole_page, **GREEDY, **USAGE),
        chat("chat, streamed, n=2", 6, max_tokens, n=2, **seeded(13), **USAGE),
        chat("chat, n=2, logprobs", 7, max_tokens, n=2, **logprobs, **seeded(14)),
        chat("chat, streamed, stop strings", 8, max_tokens, **stop, **seeded(15), **USAGE),
        chat("chat, streamed, penalties", 9, max_tokens, **PENALTIES, **seeded(16), **USAGE),
        chat("chat, streamed, logprobs, n=3", 10, max_tokens, n=3, **logprobs, **PENALTIES, **seeded(17), **USAGE),
        completion("completions, streamed", 11, max_tokens, **GREEDY, **USAGE),
        completion("completions, seeded", 12, max_tokens, **seeded(18)),
        completion("completions, streamed, logprobs", 13, max_tokens, logprobs=2, **GREEDY, **USAGE),
        completion("completions, stop strings, penalties", 14, max_tokens, **stop, **PENALTIES, **seeded(19)),
        generate("generate, streamed, logprobs", 15, max_tokens, logprobs=2, **GREEDY, **USAGE),
        generate("generate, seeded", 16, max_tokens, **seeded(20)),
        chat("chat, streamed, schema, n=2", 17, max_tokens, n=2, guided_json=LONG_LIST, **seeded(21), **USAGE),
        completion("completions, streamed, expression", 18, max_tokens, guided_regex=LONG_LINES, **GREEDY, **USAGE),
        chat("chat, streamed, a call, n=4", 20, max_tokens, n=4, **FORCED_CALL, **seeded(23), **USAGE),
        chat("chat, a call", 21, max_tokens, **FORCED_CALL, **seeded(24)),
        generate("generate, schema", 19, max_tokens, guided_json=LONG_LIST, **seeded(22)),
    ]
