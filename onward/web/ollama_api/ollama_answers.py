"""Writes answers in Ollama's form, made from the answers of the endpoint that got the converted request.

A stream is one JSON object for each line. A tool call is one object, written when its arguments are complete. Does not
know HTTP, and reads no clock.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from onward.web.ollama_api.answer_kind import AnswerKind
from onward.web.ollama_api.ollama_errors import ollama_error_body

LOADED = "load"
"""`done_reason` of an answer for which nothing was generated."""
_EVENT_END = b"\n\n"
_DONE_REASONS = {"tool_calls": "stop"}
_COMPLETE_REASONS = ("stop", "tool_calls")
_NS_PER_S = 1_000_000_000


class FunctionDelta(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct, frozen=True):
    function: FunctionDelta
    index: int | None = None
    id: str | None = None


class OutputDelta(msgspec.Struct, frozen=True):
    """New output of a chunk, or the whole message of a body."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class TokenLogprobList(msgspec.Struct, frozen=True):
    content: list[msgspec.Raw] | None = None


class AnsweredChoice(msgspec.Struct, frozen=True):
    delta: OutputDelta | None = None
    message: OutputDelta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: TokenLogprobList | None = None

    @property
    def output(self) -> OutputDelta:
        return self.delta or self.message or OutputDelta(self.text)


class AnsweredUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class AnsweredChunk(msgspec.Struct, frozen=True):
    choices: list[AnsweredChoice] = []
    usage: AnsweredUsage | None = None


class AnsweredVector(msgspec.Struct, frozen=True):
    embedding: msgspec.Raw


class AnsweredVectors(msgspec.Struct, frozen=True):
    data: list[AnsweredVector]
    usage: AnsweredUsage = AnsweredUsage()


_chunks = msgspec.json.Decoder(AnsweredChunk)
_vectors = msgspec.json.Decoder(AnsweredVectors)


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """Durations of one request. `until_first_token_s` is None if there was no token."""

    total_s: float
    until_first_token_s: float | None = None

    def fields(self, usage: AnsweredUsage) -> dict[str, int]:
        until_first_s = self.total_s if self.until_first_token_s is None else self.until_first_token_s
        return {
            "total_duration": _ns(self.total_s),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(until_first_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(self.total_s - until_first_s),
        }


class OllamaAnswerWriter:
    """Writes the answer to one request of `/api/chat` or `/api/generate`, as lines or as one body."""

    def __init__(self, model: str, kind: AnswerKind) -> None:
        assert kind is not AnswerKind.EMBED, "vectors are no text"
        self._model, self._kind = model, kind
        self._unread = b""
        self._calls = _CallBuffer()
        self._usage = AnsweredUsage()
        self._finish_reason: str | None = None
        self.has_failed = False
        """Whether there was an error line, which is the last one."""

    @property
    def is_finished(self) -> bool:
        """Whether the stream has reached the end of the output, so that `last_line` may be written."""
        return self._finish_reason is not None

    def lines(self, events: bytes, wall_s: float) -> bytes:
        """Returns the lines for a part of an event stream, which may end in the middle of an event."""
        *complete, self._unread = (self._unread + events).split(_EVENT_END)
        return b"".join(line + b"\n" for event in complete for line in self._event_lines(event, wall_s))

    def last_line(self, times: AnswerTimes, wall_s: float) -> bytes:
        return self._json(self._last_fields(OutputDelta(), [], times), wall_s) + b"\n"

    def body(self, answer: bytes, times: AnswerTimes, wall_s: float) -> bytes:
        """Returns a body that is not streamed."""
        chunk = _chunks.decode(answer)
        self._usage = chunk.usage or self._usage
        [choice] = chunk.choices
        self._finish_reason = choice.finish_reason or "stop"
        output = choice.output
        calls, text = self._new_calls(output, self._finish_reason)
        whole = OutputDelta((output.content or "") + text, output.reasoning_content)
        return self._json(self._last_fields(whole, calls, times) | _logprob_fields(choice), wall_s)

    def loaded_body(self, wall_s: float) -> bytes:
        """Returns the answer to a request without a prompt."""
        return self._json(self._output_fields(OutputDelta(), []) | {"done": True, "done_reason": LOADED}, wall_s)

    def _event_lines(self, event: bytes, wall_s: float) -> list[bytes]:
        lines = event.split(b"\n")
        data = next((line[len(b"data:") :].strip() for line in lines if line.startswith(b"data:")), None)
        if data is None:
            # A comment that keeps the connection alive. A line is the only thing that can do so here.
            return [self._line(OutputDelta(), [], {}, wall_s)]
        if b"event: error" in lines:
            self.has_failed = True
            return [ollama_error_body(data, self._kind)]
        if not data or data == b"[DONE]":
            return []
        chunk = _chunks.decode(data)
        self._usage = chunk.usage or self._usage
        return [line for choice in chunk.choices for line in self._choice_lines(choice, wall_s)]

    def _choice_lines(self, choice: AnsweredChoice, wall_s: float) -> list[bytes]:
        output, logprobs = choice.output, _logprob_fields(choice)
        self._finish_reason = self._finish_reason or choice.finish_reason
        calls, text = self._new_calls(output, choice.finish_reason)
        delta = OutputDelta((output.content or "") + text, output.reasoning_content)
        has_output = bool(delta.content or delta.reasoning_content or calls or logprobs)
        return [self._line(delta, calls, logprobs, wall_s)] if has_output else []

    def _new_calls(self, output: OutputDelta, finish_reason: str | None) -> tuple[list[dict[str, Any]], str]:
        """Returns the calls that are complete now, and the text of calls that cannot be run."""
        calls, text = self._calls.add(output.tool_calls or [])
        if finish_reason is not None:
            last_calls, last_text = self._calls.close(is_cut=finish_reason not in _COMPLETE_REASONS)
            calls, text = calls + last_calls, text + last_text
        return calls, text

    def _line(self, output: OutputDelta, calls: list[dict[str, Any]], logprobs: dict[str, Any], wall_s: float) -> bytes:
        return self._json(self._output_fields(output, calls) | {"done": False} | logprobs, wall_s)

    def _last_fields(self, output: OutputDelta, calls: list[dict[str, Any]], times: AnswerTimes) -> dict[str, Any]:
        assert self._finish_reason is not None, "the output has an end"
        reason = _DONE_REASONS.get(self._finish_reason, self._finish_reason)
        fields = self._output_fields(output, calls) | {"done": True, "done_reason": reason}
        return fields | times.fields(self._usage)

    def _output_fields(self, output: OutputDelta, calls: list[dict[str, Any]]) -> dict[str, Any]:
        thinking = {"thinking": output.reasoning_content} if output.reasoning_content else {}
        if self._kind is AnswerKind.GENERATE:
            return {"response": output.content or ""} | thinking
        tool_calls = {"tool_calls": calls} if calls else {}
        return {"message": {"role": "assistant", "content": output.content or ""} | thinking | tool_calls}

    def _json(self, fields: dict[str, Any], wall_s: float) -> bytes:
        return msgspec.json.encode({"model": self._model, "created_at": rfc3339(wall_s)} | fields)


class _CallBuffer:
    """Collects the parts of tool calls until each is complete."""

    def __init__(self) -> None:
        self._index: int | None = None
        self._id: str | None = None
        self._name = ""
        self._arguments = ""

    def add(self, deltas: list[CallDelta]) -> tuple[list[dict[str, Any]], str]:
        """Returns the calls that are complete because another one has begun, as `close` does."""
        calls: list[dict[str, Any]] = []
        text = ""
        for position, delta in enumerate(deltas):
            index = position if delta.index is None else delta.index
            if index != self._index:
                last_calls, last_text = self.close(is_cut=False)
                calls, text = calls + last_calls, text + last_text
                self._index, self._id, self._name = index, delta.id, delta.function.name or ""
            self._arguments += delta.function.arguments or ""
        return calls, text

    def close(self, *, is_cut: bool) -> tuple[list[dict[str, Any]], str]:
        """Returns the last call, or its text if its arguments are no JSON object. A client must not run such a call."""
        if self._index is None:
            return [], ""
        name, text = self._name, self._arguments
        call_id = {} if self._id is None else {"id": self._id}
        self._index, self._arguments = None, ""
        try:
            arguments = {} if not text and not is_cut else msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
            return [], f'{{"name": {msgspec.json.encode(name).decode()}, "arguments": {text}'
        return [{**call_id, "function": {"name": name, "arguments": arguments}}], ""


def embed_body(model: str, answer: bytes, times: AnswerTimes) -> bytes:
    vectors = _vectors.decode(answer)
    return _embed_json(model, [one.embedding for one in vectors.data], times, vectors.usage)


def empty_embed_body(model: str) -> bytes:
    """Returns the answer to a request without an input."""
    return _embed_json(model, [], AnswerTimes(0.0), AnsweredUsage())


def _embed_json(model: str, vectors: list[msgspec.Raw], times: AnswerTimes, usage: AnsweredUsage) -> bytes:
    fields: dict[str, Any] = {"model": model, "embeddings": vectors}
    counts = times.fields(usage)
    return msgspec.json.encode(
        fields | {name: counts[name] for name in ("total_duration", "load_duration", "prompt_eval_count")}
    )


def rfc3339(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _logprob_fields(choice: AnsweredChoice) -> dict[str, Any]:
    tokens = None if choice.logprobs is None else choice.logprobs.content
    return {"logprobs": tokens} if tokens else {}


def _ns(seconds: float) -> int:
    return max(0, round(seconds * _NS_PER_S))
