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


def read(calls: ToolCallReader) -> ParseSteps[None]:
    source = calls.parser
    yield from source.read_whitespace()
    mark = yield from source.read_one_of((BEGIN,))
    while True:
        if mark is None:
            calls.emit_content()
            if not (yield from source.emit_until(BEGIN, ContentText)):
                return
        yield from source.read_whitespace()
        is_list = (yield from source.peek()) == "["
        is_whole = (yield from _read_list(calls)) if is_list else (yield from _read_named(calls))
        mark = (yield from _next_begin(calls)) if is_whole else None


def _next_begin(calls: ToolCallReader) -> ParseSteps[str | None]:
    yield from calls.read_trailing_whitespace()
    return (yield from calls.parser.read_one_of((BEGIN,)))


def _read_list(calls: ToolCallReader) -> ParseSteps[bool]:
    source = calls.parser
    source.consume()
    yield from source.read_whitespace()
    while (yield from calls.read_object()):
        yield from source.read_whitespace()
        if (yield from source.consume_if("]")):
            calls.emit_markup()
            return True
        if not (yield from source.consume_if(",")):
            return False
        yield from source.read_whitespace()
    return False


def _read_named(calls: ToolCallReader) -> ParseSteps[bool]:
    source = calls.parser
    name = yield from source.read_run(NAME_CHARACTERS)
    if (yield from source.peek()) == "[":
        mark = yield from source.read_one_of((CALL_ID, ARGS))
        if mark == CALL_ID:
            yield from source.read_run(NAME_CHARACTERS)
            mark = yield from source.read_one_of((ARGS,))
        if mark is None:
            return False
    yield from source.read_whitespace()
    return (yield from calls.read_arguments(name))
