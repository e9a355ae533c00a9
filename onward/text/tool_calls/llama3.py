"""Llama 3: JSON objects, behind a tag or bare at the beginning of the text, a semicolon between two of them.

    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": …}

A bare object is a call only if it names one of the request's tools: a model may be asked for JSON of any kind.
"""

from onward.text.incremental_parser import ParseSteps
from onward.text.message_events import ContentText
from onward.text.tool_calls.call_reader import ToolCallReader

TAG = "<|python_tag|>"
MARKS = (TAG,)


def read(calls: ToolCallReader) -> ParseSteps[None]:
    source = calls.parser
    yield from source.read_whitespace()
    is_call = yield from _begins(calls)
    while True:
        if not is_call:
            calls.emit_content()
            if not (yield from source.emit_until(TAG, ContentText)):
                return
            yield from source.read_whitespace()
        is_call = (yield from calls.read_object()) and (yield from _next_begins(calls))


def _next_begins(calls: ToolCallReader) -> ParseSteps[bool]:
    yield from calls.read_trailing_whitespace()
    yield from calls.parser.consume_if(";")
    yield from calls.parser.read_whitespace()
    return (yield from _begins(calls))


def _begins(calls: ToolCallReader) -> ParseSteps[bool]:
    if (yield from calls.parser.peek()) == "{":
        return True
    tag = yield from calls.parser.read_one_of((TAG,))
    yield from calls.parser.read_whitespace()
    return tag is not None
