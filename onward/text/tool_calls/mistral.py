"""Mistral: a tag, then a JSON list of calls, or in newer models one call as its name and its arguments.

[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, …]
[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{"zone": "UTC"}
[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{"city": "Paris"}
"""

from onward.text.incremental_parser import ParseSteps
from onward.text.message_events import ContentText
from onward.text.tool_calls.call_reader import NAME_CHARACTERS, ToolCallReader

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKS = (BEGIN, CALL_ID, ARGS)


def read(reader: ToolCallReader) -> ParseSteps[None]:
    parser = reader.parser
    yield from parser.read_whitespace()
    mark = yield from parser.read_one_of((BEGIN,))
    while True:
        if mark is None:
            reader.emit_content()
            if not (yield from parser.emit_until(BEGIN, ContentText)):
                return
        yield from parser.read_whitespace()
        is_list = (yield from parser.peek()) == "["
        is_whole = (yield from _read_list(reader)) if is_list else (yield from _read_named(reader))
        mark = (yield from _next_begin(reader)) if is_whole else None


def _next_begin(reader: ToolCallReader) -> ParseSteps[str | None]:
    yield from reader.read_trailing_whitespace()
    return (yield from reader.parser.read_one_of((BEGIN,)))


def _read_list(reader: ToolCallReader) -> ParseSteps[bool]:
    parser = reader.parser
    parser.consume()
    yield from parser.read_whitespace()
    while (yield from reader.read_object()):
        yield from parser.read_whitespace()
        if (yield from parser.consume_if("]")):
            reader.emit_markup()
            return True
        if not (yield from parser.consume_if(",")):
            return False
        yield from parser.read_whitespace()
    return False


def _read_named(reader: ToolCallReader) -> ParseSteps[bool]:
    parser = reader.parser
    name = yield from parser.read_run(NAME_CHARACTERS)
    if (yield from parser.peek()) == "[":
        mark = yield from parser.read_one_of((CALL_ID, ARGS))
        if mark == CALL_ID:
            yield from parser.read_run(NAME_CHARACTERS)
            mark = yield from parser.read_one_of((ARGS,))
        if mark is None:
            return False
    yield from parser.read_whitespace()
    return (yield from reader.read_arguments(name))
