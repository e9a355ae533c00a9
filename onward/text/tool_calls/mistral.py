"""Mistral: a tag, then a JSON list of calls, or in newer models one call as its name and its arguments.

[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, …]
[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{"zone": "UTC"}
[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{"city": "Paris"}
"""

from onward.text.message_events import Content
from onward.text.piecewise import Steps
from onward.text.tool_calls.calls import NAME_CHARACTERS, Calls

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKS = (BEGIN, CALL_ID, ARGS)


def read(calls: Calls) -> Steps[None]:
    source = calls.source
    yield from source.blanks()
    mark = yield from source.one_of((BEGIN,))
    while True:
        if mark is None:
            calls.words()
            if not (yield from source.until(BEGIN, Content)):
                return
        yield from source.blanks()
        is_list = (yield from source.peek()) == "["
        is_whole = (yield from _read_list(calls)) if is_list else (yield from _read_named(calls))
        mark = (yield from _next_begin(calls)) if is_whole else None


def _next_begin(calls: Calls) -> Steps[str | None]:
    yield from calls.blanks_behind()
    return (yield from calls.source.one_of((BEGIN,)))


def _read_list(calls: Calls) -> Steps[bool]:
    source = calls.source
    source.take()
    yield from source.blanks()
    while (yield from calls.read_object()):
        yield from source.blanks()
        if (yield from source.take_if("]")):
            calls.tell_marks()
            return True
        if not (yield from source.take_if(",")):
            return False
        yield from source.blanks()
    return False


def _read_named(calls: Calls) -> Steps[bool]:
    source = calls.source
    name = yield from source.run(NAME_CHARACTERS)
    if (yield from source.peek()) == "[":
        mark = yield from source.one_of((CALL_ID, ARGS))
        if mark == CALL_ID:
            yield from source.run(NAME_CHARACTERS)
            mark = yield from source.one_of((ARGS,))
        if mark is None:
            return False
    yield from source.blanks()
    return (yield from calls.read_arguments(name))
