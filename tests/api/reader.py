"""Reads an answer of any of the three generating endpoints, streamed or not, into one form."""

import ssl
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from onward.proto.cursor import Cursor, parse_cursor

PROMPT = [97, 98, 99]
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": PROMPT},
    "/v1/generate": {"prompt_token_ids": PROMPT},
}
PATHS = list(PROMPTS)

NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Reading the system's would take longer than most answers here."""


@dataclass
class ChoiceRead:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """From the cursors of a stream, or as `/v1/generate` shows them."""
    logprobs: list[Any] = field(default_factory=list)
    """One entry per token, in the form of its endpoint."""
    finish_reason: str | None = None
    num_ends: int = 0
    completion_token_ids: list[int] | None = None
    num_text_tokens: int | None = None
    error: dict[str, Any] | None = None
    returned_token_ids: list[int] = field(default_factory=list)
    """With `return_token_ids`."""
    prompt_token_ids: list[int] | None = None
    reasoning: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    """By their index: id, name and arguments."""


@dataclass
class AnswerRead:
    choices: list[ChoiceRead]
    usage: dict[str, Any] | None = None
    seed: int | None = None
    resume: dict[str, Any] | None = None
    cursor: Cursor | None = None
    """The last one of a stream."""
    error: dict[str, Any] | None = None
    """The error event of a stream that ended with one."""
    partial: dict[str, Any] | None = None
    """Next to it."""
    prompt_token_ids: list[int] | None = None
    usages: list[int] = field(default_factory=list)
    """Output tokens so far, as each chunk tells them, or an answer at its end."""

    @property
    def texts(self) -> list[str]:
        return [one.text for one in self.choices]

    @property
    def reasons(self) -> list[str | None]:
        return [one.finish_reason for one in self.choices]

    @property
    def logprobs(self) -> list[list[Any]]:
        return [one.logprobs for one in self.choices]

    @property
    def completion_token_ids(self) -> list[list[int] | None]:
        return [one.completion_token_ids for one in self.choices]


def request(path: str, streaming: bool, **fields: Any) -> dict[str, Any]:
    """Streams are asked for their usage, so that both kinds tell it."""
    body = {"model": "small-model"} | PROMPTS[path] | fields
    return body | {"stream": True, "stream_options": {"include_usage": True}} if streaming else body


def ask(url: str, path: str, body: dict[str, Any]) -> AnswerRead:
    response = httpx.post(url + path, json=body, timeout=30, verify=NO_CERTIFICATES)
    assert response.status_code == 200, response.text
    return read(response, body)


def num_choices(body: dict[str, Any]) -> int:
    prompt = body.get("prompt")
    is_list = isinstance(prompt, list) and not isinstance(prompt[0], int)
    return body.get("n", 1) * (len(prompt) if is_list else 1)


def read(response: httpx.Response, body: dict[str, Any]) -> AnswerRead:
    answer = AnswerRead([ChoiceRead() for _ in range(num_choices(body))])
    if body.get("stream"):
        _read_stream(answer, response.text)
    else:
        take(answer, response.json())
    return answer


def _read_stream(answer: AnswerRead, text: str) -> None:
    *events, done, nothing = text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    for event in events:
        lines = dict(line.split(": ", 1) for line in event.split("\n"))
        data = msgspec.json.decode(lines["data"])
        if "event" in lines:
            assert lines["event"] == "error" and event is events[-1]
            answer.error, answer.partial = data["error"], data.get("partial")
            return
        take(answer, data)
        if "id" in lines:
            answer.cursor = parse_cursor(lines["id"])
            for index, token_ids in answer.cursor.new_tokens.items():
                answer.choices[index].token_ids += token_ids


def take(answer: AnswerRead, data: dict[str, Any]) -> None:
    assert answer.resume is None or not data["choices"], "what is needed to continue comes with the last choice"
    answer.usage = data.get("usage") or answer.usage
    answer.prompt_token_ids = data.get("prompt_token_ids", answer.prompt_token_ids)
    is_chunk = any("message" not in choice for choice in data["choices"])
    if is_chunk and data.get("usage"):
        answer.usages.append(data["usage"]["completion_tokens"])
    answer.seed = data.get("seed", answer.seed)
    answer.resume = data.get("resume", answer.resume)
    for choice in data["choices"]:
        one = answer.choices[choice["index"]]
        said = choice.get("delta") or choice.get("message") or choice
        one.text += said.get("content", said.get("text", "")) or ""
        one.reasoning += said.get("reasoning_content", "")
        _take_calls(one, said.get("tool_calls", []))
        if data["object"] == "generate":
            one.token_ids += choice["token_ids"]
        else:
            one.returned_token_ids += choice.get("token_ids", [])
        one.prompt_token_ids = choice.get("prompt_token_ids", one.prompt_token_ids)
        one.logprobs += _entries(choice["logprobs"])
        one.completion_token_ids = choice.get("completion_token_ids", one.completion_token_ids)
        one.num_text_tokens = choice.get("num_text_tokens", one.num_text_tokens)
        one.error = choice.get("error", one.error)
        if choice["finish_reason"] is not None:
            one.finish_reason = choice["finish_reason"]
            one.num_ends += 1


def _take_calls(choice: ChoiceRead, calls: list[dict[str, Any]]) -> None:
    for place, call in enumerate(calls):
        index = call.get("index", place)
        is_custom = "custom" in call
        function = call["custom"] if is_custom else call["function"]
        if "id" in call:
            assert index == len(choice.calls), "a call begins once, and in its turn"
            choice.calls[index] = {"id": call["id"], "name": function["name"], "arguments": ""}
        choice.calls[index]["arguments"] += function["input" if is_custom else "arguments"]


def _entries(logprobs: Any) -> list[Any]:
    match logprobs:
        case None:
            return []
        case {"content": list(content)}:
            return content
        case {"tokens": _}:
            return list(zip(*logprobs.values(), strict=True))
        case _:
            return logprobs
