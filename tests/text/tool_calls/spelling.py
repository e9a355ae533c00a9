"""Calls as each format's models write them, and texts that are nearly so."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from onward.text.tool_calls.tool_call_formats import TOOL_CALL_FORMATS

NAMES = ("get_weather", "f", "look-up.v2")
Call = tuple[str, dict[str, Any]]


def _object(call: Call, key: str) -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call, 'arguments')}\n</tool_call>" for call in calls)


def llama3_json(calls: Sequence[Call]) -> str:
    return "<|python_tag|>" + "; ".join(_object(call, "parameters") for call in calls)


def mistral(calls: Sequence[Call]) -> str:
    return "[TOOL_CALLS][" + ", ".join(_object(call, "arguments") for call in calls) + "]"


def mistral_named(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}{json.dumps(arguments)}" for name, arguments in calls)


def mistral_args(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]abc123XYZ[ARGS]{json.dumps(given)}" for name, given in calls)


def deepseek_v3(calls: Sequence[Call]) -> str:
    rows = (f"function<｜tool▁sep｜>{name}\n```json\n{json.dumps(given)}\n```" for name, given in calls)
    return _deepseek_frame(rows)


def deepseek_v31(calls: Sequence[Call]) -> str:
    return _deepseek_frame(f"{name}<｜tool▁sep｜>{json.dumps(given)}" for name, given in calls)


def _deepseek_frame(rows: Any) -> str:
    inside = "\n".join(f"<｜tool▁call▁begin｜>{row}<｜tool▁call▁end｜>" for row in rows)
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def plain_json(calls: Sequence[Call]) -> str:
    return "[" + ",\n ".join(_object(call, "arguments") for call in calls) + "]"


def pythonic(calls: Sequence[Call]) -> str:
    return (
        "[" + ", ".join(f"{name}({', '.join(f'{k}={v!r}' for k, v in given.items())})" for name, given in calls) + "]"
    )


SPELLINGS: list[tuple[str, Callable[[Sequence[Call]], str]]] = [
    ("hermes", hermes),
    ("llama3_json", llama3_json),
    ("mistral", mistral),
    ("mistral", mistral_named),
    ("mistral", mistral_args),
    ("deepseek_v3", deepseek_v3),
    ("deepseek_v31", deepseek_v31),
    ("json", plain_json),
    ("pythonic", pythonic),
]
WITH_TEXT_BEFORE = {"hermes", "llama3_json", "mistral", "deepseek_v3", "deepseek_v31"}
"""Where calls may follow words."""

_keys = st.sampled_from(["city", "a", "x_1"])
_texts = st.text(alphabet="aé\"'\\{}[]<>| \n\t👍/`", max_size=8)
_scalars = st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, allow_infinity=False)
_values = st.recursive(
    _scalars | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=5,
)
calls = st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(_keys, _values, max_size=3)), min_size=1, max_size=3)

_MARKS = [mark for one in TOOL_CALL_FORMATS.values() for mark in one.markers]
_SCRAPS = [
    *_MARKS, *(mark[:-1] for mark in _MARKS), *(mark[:3] for mark in _MARKS),
    '{"name": "f", "arguments": {"a": [1, 2]}}', '{"name":"f","parameters":{}}', '{"arguments":{"a":"}"},"name":"f"}',
    '{"name": "f"}', '{"name": "unknown", "arguments": {}}', '{"name": "f", "arguments": "{\\"a\\": 1}"}',
    '{"name": "f", "arguments": {"a": ', '{"name": "f", "arguments": {"a" 1}}', '{"type":"function","name":"f"',
    "[f(a=1), g()]", "[f(a='x\\n')", "f", "function", "```json\n", "```", "\n", " ", "{", "}", "[", "]", ",", ";", '"',
    "\\", "null", "1", "Let me see.", "é", "<", ">", "(", ")", "=",
]  # fmt: skip
nearly_calls = st.lists(st.sampled_from(_SCRAPS), max_size=10).map("".join)
