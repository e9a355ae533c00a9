"""Calls as nothing but JSON: one object, several, or a list of them; perhaps in a fenced block.

    [{"name": "get_weather", "arguments": {"city": "Paris"}}]

For models that were told so in words, and for answers that a grammar forces to be calls. Only the beginning of a text is
looked at, and only the names of the request's tools make a call: anything else is words.
"""

from onward.text.incremental_parser import ParseSteps
from onward.text.message_events import ContentText
from onward.text.tool_calls.call_reader import ToolCallReader

FENCE, LANGUAGE = "```", "json"


def read(calls: ToolCallReader) -> ParseSteps[None]:
    source = calls.parser
    yield from source.read_whitespace()
    if (yield from source.peek()) == FENCE[0]:
        yield from _read_fenced(calls)
    else:
        yield from _read_calls(calls)
    calls.emit_content()
    yield from source.emit_rest(ContentText)


def _read_fenced(calls: ToolCallReader) -> ParseSteps[None]:
    source = calls.parser
    if (yield from source.read_one_of((FENCE,))) is None:
        return
    if (yield from source.peek()) == LANGUAGE[0] and (yield from source.read_one_of((LANGUAGE,))) is None:
        return
    yield from source.read_whitespace()
    if not (yield from _read_calls(calls)):
        return
    if (yield from source.read_one_of((FENCE,))) is not None:
        yield from calls.read_trailing_whitespace()


def _read_calls(calls: ToolCallReader) -> ParseSteps[bool]:
    source = calls.parser
    in_list = yield from source.consume_if("[")
    yield from source.read_whitespace()
    while (yield from calls.read_object()):
        yield from calls.read_trailing_whitespace()
        if in_list and (yield from source.consume_if("]")):
            yield from calls.read_trailing_whitespace()
            return True
        yield from source.consume_if("," if in_list else ";")
        yield from source.read_whitespace()
        if (yield from source.peek()) != "{":
            return not in_list
    return False
