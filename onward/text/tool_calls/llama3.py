"""Llama 3: JSON objects, behind a tag or bare at the beginning of the text, a semicolon between two of them.

    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": …}

A bare object is a call only if it names one of the request's tools: a model may be asked for JSON of any kind.
"""

from onward.text.message_events import Content
from onward.text.piecewise import Steps
from onward.text.tool_calls.calls import Calls

TAG = "<|python_tag|>"
MARKS = (TAG,)


def read(calls: Calls) -> Steps[None]:
    source = calls.source
    yield from source.blanks()
    is_call = yield from _begins(calls)
    while True:
        if not is_call:
            calls.words()
            if not (yield from source.until(TAG, Content)):
                return
            yield from source.blanks()
        is_call = (yield from calls.read_object()) and (yield from _next_begins(calls))


def _next_begins(calls: Calls) -> Steps[bool]:
    yield from calls.blanks_behind()
    yield from calls.source.take_if(";")
    yield from calls.source.blanks()
    return (yield from _begins(calls))


def _begins(calls: Calls) -> Steps[bool]:
    if (yield from calls.source.peek()) == "{":
        return True
    tag = yield from calls.source.one_of((TAG,))
    yield from calls.source.blanks()
    return tag is not None
