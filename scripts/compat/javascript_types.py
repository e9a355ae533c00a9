"""Answers of a server, recorded and checked by `tsc` against the types of the JavaScript packages.

Each recorded answer or event is one file that assigns it to its type, so unknown and missing fields are errors too.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from .clients import ClientChecks, Runtime
from .results import CheckResult, Outcome

TYPES = ClientChecks(
    "javascript-types", Runtime.NODE, ("typescript@7.0.2", "openai@7.55.0", "@anthropic-ai/sdk@1.10.0"), ""
)
TIMEOUT_S = 300
_FILE = re.compile(r"^answers/([\w-]+)\.ts\(", re.MULTILINE)
_IMPORTS = 'import type Anthropic from "@anthropic-ai/sdk";\nimport type OpenAI from "openai";\n'
_COMPILER = {
    "strict": True,
    "noEmit": True,
    "skipLibCheck": True,
    "module": "nodenext",
    "target": "es2022",
    "types": [],
}
OURS = frozenset({"retryable", "max_model_len", "root", "stop_reason", "matched_stop"})
"""Documented fields beside those of OpenAI; taken out before the comparison. Anthropic's messages have a `stop_reason`."""
BEYOND_PACKAGE = frozenset({"store", "presence_penalty", "frequency_penalty", "name"})
"""Fields of OpenAI's specification that the package's types lack, of responses and their events."""

NULLABLE = frozenset({"usage", "prompt_cache_key", "safety_identifier", "user", "description"})
"""Fields of responses that are null where there is nothing, by the specification or in OpenAI's documentation, and that the
package's types do not allow to be null."""

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "get_weather", "description": "The weather of a city", "parameters": CITY}
_QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
_CHAT = {"messages": _QUESTION, "max_tokens": 40, "temperature": 0}
_RESPONSE = {"input": "What is the capital of France?", "max_output_tokens": 40, "temperature": 0}
_SCHEMA = {"name": "city", "schema": CITY, "strict": True}


@dataclass(frozen=True, slots=True)
class Recording:
    """A request, and the types of its answer and of the events of its stream."""

    name: str
    path: str
    body: dict[str, Any]
    answer_type: str
    event_type: str | None = None


_CHAT_TYPES = ("OpenAI.Chat.ChatCompletion", "OpenAI.Chat.ChatCompletionChunk")
_RESPONSE_TYPES = ("OpenAI.Responses.Response", "OpenAI.Responses.ResponseStreamEvent")
_MESSAGE_TYPES = ("Anthropic.Message", "Anthropic.RawMessageStreamEvent")
_CHATS = "/v1/chat/completions"
RECORDINGS = (
    Recording("chat", _CHATS, _CHAT, *_CHAT_TYPES),
    Recording("chat-cut", _CHATS, _CHAT | {"max_tokens": 2}, *_CHAT_TYPES),
    Recording("chat-logprobs", _CHATS, _CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2}, *_CHAT_TYPES),
    Recording(
        "chat-tools",
        _CHATS,
        _CHAT | {"tools": [{"type": "function", "function": _FUNCTION}], "tool_choice": "required"},
        *_CHAT_TYPES,
    ),
    Recording(
        "chat-schema",
        _CHATS,
        _CHAT | {"response_format": {"type": "json_schema", "json_schema": _SCHEMA}},
        *_CHAT_TYPES,
    ),
    Recording("chat-error", _CHATS, _CHAT | {"temperature": -1}, "{ error: OpenAI.ErrorObject }"),
    Recording("model-error", _CHATS, _CHAT | {"model": "absent"}, "{ error: OpenAI.ErrorObject }"),
    Recording("completion", "/v1/completions", {"prompt": "a", "max_tokens": 4, "logprobs": 1}, "OpenAI.Completion"),
    Recording("embedding", "/v1/embeddings", {"input": ["a", "b"]}, "OpenAI.CreateEmbeddingResponse"),
    Recording("response", "/v1/responses", _RESPONSE, *_RESPONSE_TYPES),
    Recording("response-cut", "/v1/responses", _RESPONSE | {"max_output_tokens": 2}, *_RESPONSE_TYPES),
    Recording(
        "response-tools",
        "/v1/responses",
        _RESPONSE | {"tools": [{"type": "function", **_FUNCTION}], "tool_choice": "required"},
        *_RESPONSE_TYPES,
    ),
    Recording(
        "response-schema",
        "/v1/responses",
        _RESPONSE | {"text": {"format": {"type": "json_schema", **_SCHEMA}}},
        *_RESPONSE_TYPES,
    ),
    Recording(
        "response-logprobs",
        "/v1/responses",
        _RESPONSE | {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
        *_RESPONSE_TYPES,
    ),
    Recording("response-error", "/v1/responses", _RESPONSE | {"temperature": -1}, "{ error: OpenAI.ErrorObject }"),
    Recording("message", "/v1/messages", _CHAT, *_MESSAGE_TYPES),
    Recording("message-cut", "/v1/messages", _CHAT | {"max_tokens": 2}, *_MESSAGE_TYPES),
    Recording("message-stop", "/v1/messages", _CHAT | {"stop_sequences": ["Paris"]}, *_MESSAGE_TYPES),
    Recording(
        "message-tools",
        "/v1/messages",
        _CHAT | {"tools": [{"name": "get_weather", "input_schema": CITY}], "tool_choice": {"type": "any"}},
        *_MESSAGE_TYPES,
    ),
    Recording("message-error", "/v1/messages", _CHAT | {"temperature": -1}, "Anthropic.ErrorResponse"),
    Recording("count", "/v1/messages/count_tokens", {"messages": _QUESTION}, "Anthropic.MessageTokensCount"),
)


def run_javascript_types(folder: Path, url: str, model: str, log: Path) -> list[CheckResult]:
    """One result for each answer and each stream."""
    answers = folder / "answers"
    answers.mkdir(exist_ok=True)
    for old in answers.iterdir():
        old.unlink()
    names = []
    with httpx.Client(base_url=url, timeout=120) as http:
        for recording in RECORDINGS:
            for name, text in _record(http, recording, model):
                (answers / f"{name}.ts").write_text(text)
                names.append(name)
    (folder / "tsconfig.json").write_text(json.dumps({"compilerOptions": _COMPILER, "include": ["answers/*.ts"]}))
    compiler = [folder / "node_modules" / ".bin" / "tsc", "--pretty", "false", "-p", folder / "tsconfig.json"]
    run = subprocess.run(compiler, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    log.write_text(run.stdout + run.stderr)
    wrong = set(_FILE.findall(run.stdout))
    if run.returncode != 0 and not wrong:
        return [CheckResult("tsc", Outcome.FAILED, detail=f"it ended with status {run.returncode}; see {log}")]
    return [
        CheckResult(name, Outcome.FAILED if name in wrong else Outcome.PASSED, detail=f"see {log}") for name in names
    ]


def _record(http: httpx.Client, recording: Recording, model: str) -> Iterator[tuple[str, str]]:
    body = {"model": model} | recording.body
    yield recording.name, _file([(recording.answer_type, http.post(recording.path, json=body).json())])
    if recording.event_type is not None:
        text = http.post(recording.path, json=body | {"stream": True}).text
        data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        events = [event for event in map(json.loads, data) if event.get("type") != "ping"]
        assert events, recording.name
        yield f"{recording.name}-stream", _file([(recording.event_type, event) for event in events])


def _file(values: list[tuple[str, Any]]) -> str:
    lines = [
        f"export const value{number}: {kind} = {json.dumps(_without_ours(kind, value))};\n"
        for number, (kind, value) in enumerate(values)
    ]
    return _IMPORTS + "".join(lines)


def _without_ours(kind: str, value: Any) -> Any:
    """Without the documented fields that the package's types cannot have, and with the one that the package adds."""
    match value:
        case dict() if kind.startswith("Anthropic"):
            return value if "error" not in value else value | {"error": _picked(value["error"], {"type", "message"})}
        case dict():
            left_out = OURS
            if _is_response(value):
                left_out |= {name for name in NULLABLE if value.get(name) is None}
                left_out |= BEYOND_PACKAGE if value.get("type") != "json_schema" else frozenset()
            added = {"output_text": ""} if value.get("object") == "response" else {}
            return added | {name: _without_ours(kind, one) for name, one in value.items() if name not in left_out}
        case list():
            return [_without_ours(kind, one) for one in value]
    return value


def _is_response(value: dict[str, Any]) -> bool:
    """A response, or a part of one."""
    types = ("response.function_call_arguments.done", "json_schema")
    return value.get("object") == "response" or value.get("type") in types


def _picked(fields: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: one for name, one in fields.items() if name in names}
