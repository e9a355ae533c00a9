"""A chat whose last message is left open, so that the model goes on with it.

Templates close every message. So a mark is put behind the last one's text, and the prompt is what comes before it: a
template may cut spaces off the mark, but not off the text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from onward.errors import InvalidRequest

MARK = "\ue000open\ue001"
"""Of characters that stand for nothing in Unicode."""


def add_marker(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages may be unchecked: a router renders before anybody has looked at them."""
    *before, last = messages or [{}]
    match last.get("content"):
        case str(text):
            return [*before, {**last, "content": text + MARK}]
        case [*parts, {"text": str(text)} as final]:
            return [*before, {**last, "content": [*parts, {**final, "text": text + MARK}]}]
    raise _refused("there is no last message with a text")


def cut_at_marker(rendered: str) -> str:
    prompt, mark, _ = rendered.rpartition(MARK)
    if not mark:
        raise _refused("the chat template does not show the last message as it is, so it cannot be left open")
    return prompt


def _refused(problem: str) -> InvalidRequest:
    return InvalidRequest(f"continue_final_message: {problem}", param="continue_final_message")
