"""Hermes, Qwen and their kin: each call is a JSON object between two tags.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from onward.text.message_events import Content
from onward.text.piecewise import Steps
from onward.text.tool_calls.calls import Calls

BEGIN, END = "<tool_call>", "</tool_call>"
MARKS = (BEGIN, END)


def read(calls: Calls) -> Steps[None]:
    source = calls.source
    yield from source.blanks()
    mark = yield from source.one_of((BEGIN,))
    while True:
        if mark is None:
            calls.words()
            if not (yield from source.until(BEGIN, Content)):
                return
        yield from source.blanks()
        mark = (yield from _next_mark(calls)) if (yield from calls.read_object()) else None


def _next_mark(calls: Calls) -> Steps[str | None]:
    """Behind a call: where the next one begins at once. A missing end is forgiven there."""
    source = calls.source
    yield from calls.blanks_behind()
    mark = yield from source.one_of(MARKS)
    if mark == END:
        yield from calls.blanks_behind()
        mark = yield from source.one_of((BEGIN,))
    return mark
