"""DeepSeek: rows of calls between tags. V3 and R1 write arguments as a fenced block, V3.1 plainly.

V3    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
      ```json
      {"city": "Paris"}
      ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
V3.1  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>…
"""

from collections.abc import Callable
from functools import partial

from onward.text.incremental_parser import ParseSteps
from onward.text.message_events import ContentText
from onward.text.tool_calls.call_reader import NAME_CHARACTERS, ToolCallReader

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MARKS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
FENCE_BEGIN, FENCE_END = "```json", "```"

ReadCall = Callable[[ToolCallReader], ParseSteps[bool]]


def _read(read_call: ReadCall, reader: ToolCallReader) -> ParseSteps[None]:
    parser = reader.parser
    yield from parser.read_whitespace()
    mark = yield from parser.read_one_of((CALLS_BEGIN,))
    while True:
        if mark is None:
            reader.emit_content()
            if not (yield from parser.emit_until(CALLS_BEGIN, ContentText)):
                return
        mark = (yield from _next_row(reader)) if (yield from _read_row(read_call, reader)) else None


def _next_row(reader: ToolCallReader) -> ParseSteps[str | None]:
    yield from reader.read_trailing_whitespace()
    return (yield from reader.parser.read_one_of((CALLS_BEGIN,)))


def _read_row(read_call: ReadCall, reader: ToolCallReader) -> ParseSteps[bool]:
    parser, num_before = reader.parser, reader.num_started
    while True:
        yield from parser.read_whitespace()
        mark = yield from parser.read_one_of((CALL_BEGIN, CALLS_END))
        if mark != CALL_BEGIN:
            break
        yield from parser.read_whitespace()
        if not (yield from read_call(reader)):
            return False
        yield from parser.read_whitespace()
        if (yield from parser.read_one_of((CALL_END,))) is None:
            return False
        reader.emit_markup()
    if mark is None or reader.num_started == num_before:
        return False
    reader.emit_markup()
    return True


def _read_fenced_call(reader: ToolCallReader) -> ParseSteps[bool]:
    parser = reader.parser
    yield from parser.read_run(NAME_CHARACTERS)  # the kind, which is always `function`
    if (yield from parser.read_one_of((SEPARATOR,))) is None:
        return False
    name = yield from parser.read_run(NAME_CHARACTERS)
    yield from parser.read_whitespace()
    if (yield from parser.read_one_of((FENCE_BEGIN,))) is None:
        return False
    yield from parser.read_whitespace()
    if not (yield from reader.read_arguments(name)):
        return False
    yield from parser.read_whitespace()
    return (yield from parser.read_one_of((FENCE_END,))) is not None


def _read_plain_call(reader: ToolCallReader) -> ParseSteps[bool]:
    parser = reader.parser
    name = yield from parser.read_run(NAME_CHARACTERS)
    if (yield from parser.read_one_of((SEPARATOR,))) is None:
        return False
    yield from parser.read_whitespace()
    return (yield from reader.read_arguments(name))


read_v3 = partial(_read, _read_fenced_call)
read_v31 = partial(_read, _read_plain_call)
