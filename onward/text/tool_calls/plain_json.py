"""Calls as nothing but JSON: one object, several, or a list of them; perhaps in a fenced block.

    [{"name": "get_weather", "arguments": {"city": "Paris"}}]

For models that were told so in words, and for answers that a grammar forces to be calls. Only the beginning of a text is
looked at, and only the names of the request's tools make a call: anything else is words.
"""

from onward.text.message_events import Content
from onward.text.piecewise import Steps
from onward.text.tool_calls.calls import Calls

FENCE, LANGUAGE = "```", "json"


def read(calls: Calls) -> Steps[None]:
    source = calls.source
    yield from source.blanks()
    if (yield from source.peek()) == FENCE[0]:
        yield from _read_fenced(calls)
    else:
        yield from _read_calls(calls)
    calls.words()
    yield from source.rest(Content)


def _read_fenced(calls: Calls) -> Steps[None]:
    source = calls.source
    if (yield from source.one_of((FENCE,))) is None:
        return
    if (yield from source.peek()) == LANGUAGE[0] and (yield from source.one_of((LANGUAGE,))) is None:
        return
    yield from source.blanks()
    if not (yield from _read_calls(calls)):
        return
    if (yield from source.one_of((FENCE,))) is not None:
        yield from calls.blanks_behind()


def _read_calls(calls: Calls) -> Steps[bool]:
    source = calls.source
    in_list = yield from source.take_if("[")
    yield from source.blanks()
    while (yield from calls.read_object()):
        yield from calls.blanks_behind()
        if in_list and (yield from source.take_if("]")):
            yield from calls.blanks_behind()
            return True
        yield from source.take_if("," if in_list else ";")
        yield from source.blanks()
        if (yield from source.peek()) != "{":
            return not in_list
    return False
