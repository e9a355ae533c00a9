"""What the tests of Ollama's API share: kinds of answers, strict readers of them, and the answer that lines build."""

import json
from typing import Any

import httpx
from ollama import ChatResponse, GenerateResponse

from tests.api.small_model import END_OF_THOUGHT
from tests.api.thinking_model import CALL, SECOND_CALL, TOOL, tokens_of

CHAT, GENERATE = "/api/chat", "/api/generate"
MODEL = "small-model"
TOOLS: dict[str, Any] = {"tools": [TOOL]}
OTHER_TOOL = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}
TWO_TOOLS: dict[str, Any] = {"tools": [TOOL, OTHER_TOOL]}
THINK: dict[str, Any] = {"think": True}
CUT_CALL = CALL[: CALL.index("1}")]
COUNTS = ("prompt_eval_count", "eval_count")
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")

KINDS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "words": ({}, tokens_of("né, wörds")),
    "nothing": ({}, []),
    "words that are cut off": ({"options": {"num_predict": 5}}, tokens_of("on and on")),
    "a stop string": ({"options": {"stop": ["ö"]}}, tokens_of("abcö and")),
    "a call behind words": (TOOLS, tokens_of("né ", CALL)),
    "two calls and words": (TWO_TOOLS, tokens_of(CALL, "\n", SECOND_CALL, "!")),
    "a call that is cut off": (TOOLS | {"options": {"num_predict": len(CUT_CALL)}}, tokens_of(CALL)),
    "thinking": (THINK, tokens_of("hm é", END_OF_THOUGHT, "\n\nyés")),
    "a call behind thinking": (THINK | TOOLS, tokens_of("hm", END_OF_THOUGHT, "\n", CALL)),
    "structure": ({"format": TOOL["function"]["parameters"]}, tokens_of('{"a": 1}')),
}
"""What a chat asks for, and what the model says to it."""


def body_of(kind: str, **more: Any) -> dict[str, Any]:
    fields = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    options = {"seed": 7} | KINDS[kind][0].get("options", {})
    return fields | KINDS[kind][0] | {"options": options} | more


def lines_of(body: bytes) -> list[dict[str, Any]]:
    """The objects of a stream, each checked against the official package's type."""
    assert body.endswith(b"\n"), "whole lines only"
    lines = [json.loads(line) for line in body.splitlines()]
    for line in lines:
        check_line(line)
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    return lines


def check_line(line: dict[str, Any]) -> None:
    read = (ChatResponse if "message" in line else GenerateResponse).model_validate(line)
    assert set(line) <= set(type(read).model_fields), line
    assert line["model"] and line["created_at"].endswith("Z")
    if line["done"]:
        assert line["done_reason"] and all(line[name] >= 0 for name in (*COUNTS, *DURATIONS))


def built(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that a client builds from the lines, without times."""
    message: dict[str, Any] = {"content": "", "thinking": "", "tool_calls": []}
    for line in lines:
        part = line.get("message") or {"content": line["response"], "thinking": line.get("thinking", "")}
        message["content"] += part["content"]
        message["thinking"] += part.get("thinking", "")
        message["tool_calls"] += [call["function"] for call in part.get("tool_calls", [])]
    return message | {name: lines[-1][name] for name in ("done_reason", *COUNTS)}


def error_of(answer: httpx.Response) -> str:
    """The text of a refusal, which must have Ollama's form."""
    fields = answer.json()
    assert list(fields) == ["error"] and int(answer.headers["content-length"]) == len(answer.content)
    assert isinstance(fields["error"], str)
    return fields["error"]
