"""Calls as plain JSON: one object, several, or a list of them, optionally in a fenced block.

    [{"name": "get_weather", "arguments": {"city": "Paris"}}]

For models that get the format in the system message, and for answers that a grammar forces to be calls. Only the
beginning of a text is parsed, and only the names of the request's tools make a call; anything else is content.
"""

from onward.text.incremental_parser import ParseSteps
from onward.text.message_events import ContentText
from onward.text.tool_calls.call_reader import ToolCallReader

FENCE, LANGUAGE = "```", "json"


def read(reader: ToolCallReader) -> ParseSteps[None]:
    parser = reader.parser
    yield from parser.read_whitespace()
    if (yield from parser.peek()) == FENCE[0]:
        yield from _read_fenced(reader)
    else:
        yield from _read_calls(reader)
    reader.emit_content()
    yield from parser.emit_rest(ContentText)


def _read_fenced(reader: ToolCallReader) -> ParseSteps[None]:
    parser = reader.parser
    if (yield from parser.read_one_of((FENCE,))) is None:
        return
    if (yield from parser.peek()) == LANGUAGE[0] and (yield from parser.read_one_of((LANGUAGE,))) is None:
        return
    yield from parser.read_whitespace()
    if not (yield from _read_calls(reader)):
        return
    if (yield from parser.read_one_of((FENCE,))) is not None:
        yield from reader.read_trailing_whitespace()


def _read_calls(reader: ToolCallReader) -> ParseSteps[bool]:
    parser = reader.parser
    in_list = yield from parser.consume_if("[")
    yield from parser.read_whitespace()
    while (yield from reader.read_object()):
        yield from reader.read_trailing_whitespace()
        if in_list and (yield from parser.consume_if("]")):
            yield from reader.read_trailing_whitespace()
            return True
        yield from parser.consume_if("," if in_list else ";")
        yield from parser.read_whitespace()
        if (yield from parser.peek()) != "{":
            return not in_list
    return False
