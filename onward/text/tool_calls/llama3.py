"""Llama 3: JSON objects, behind a tag or bare at the beginning of the text, a semicolon between two of them.

    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": …}

A bare object is a call only if it names one of the request's tools: a model may be asked for JSON of any kind.
"""

from onward.text.incremental_parser import ParseSteps
from onward.text.message_events import ContentText
from onward.text.tool_calls.call_reader import ToolCallReader

TAG = "<|python_tag|>"
MARKS = (TAG,)


def read(reader: ToolCallReader) -> ParseSteps[None]:
    parser = reader.parser
    yield from parser.read_whitespace()
    is_call = yield from _begins(reader)
    while True:
        if not is_call:
            reader.emit_content()
            if not (yield from parser.emit_until(TAG, ContentText)):
                return
            yield from parser.read_whitespace()
        is_call = (yield from reader.read_object()) and (yield from _next_begins(reader))


def _next_begins(reader: ToolCallReader) -> ParseSteps[bool]:
    yield from reader.read_trailing_whitespace()
    yield from reader.parser.consume_if(";")
    yield from reader.parser.read_whitespace()
    return (yield from _begins(reader))


def _begins(reader: ToolCallReader) -> ParseSteps[bool]:
    if (yield from reader.parser.peek()) == "{":
        return True
    tag = yield from reader.parser.read_one_of((TAG,))
    yield from reader.parser.read_whitespace()
    return tag is not None
