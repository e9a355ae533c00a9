"""Hermes, Qwen and their kin: each call is a JSON object between two tags.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from onward.text.incremental_parser import ParseSteps
from onward.text.message_events import ContentText
from onward.text.tool_calls.call_reader import ToolCallReader

BEGIN, END = "<tool_call>", "</tool_call>"
MARKS = (BEGIN, END)


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
        mark = (yield from _next_mark(reader)) if (yield from reader.read_object()) else None


def _next_mark(reader: ToolCallReader) -> ParseSteps[str | None]:
    """Reads the end of a call with the blanks around it, and returns `BEGIN` if the next call begins at once, else
    None. A missing end before the next call is accepted."""
    parser = reader.parser
    yield from reader.read_trailing_whitespace()
    mark = yield from parser.read_one_of(MARKS)
    if mark == END:
        yield from reader.read_trailing_whitespace()
        mark = yield from parser.read_one_of((BEGIN,))
    return mark
