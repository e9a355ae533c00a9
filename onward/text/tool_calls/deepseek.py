"""DeepSeek: rows of calls between tags. V3 and R1 write arguments as a fenced block, V3.1 plainly.

V3    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
      ```json
      {"city": "Paris"}
      ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
V3.1  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>…
"""

from collections.abc import Callable
from functools import partial

from onward.text.message_events import Content
from onward.text.piecewise import Steps
from onward.text.tool_calls.calls import NAME_CHARACTERS, Calls

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MARKS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
FENCE_BEGIN, FENCE_END = "```json", "```"

ReadCall = Callable[[Calls], Steps[bool]]


def _read(read_call: ReadCall, calls: Calls) -> Steps[None]:
    source = calls.source
    yield from source.blanks()
    mark = yield from source.one_of((CALLS_BEGIN,))
    while True:
        if mark is None:
            calls.words()
            if not (yield from source.until(CALLS_BEGIN, Content)):
                return
        mark = (yield from _next_row(calls)) if (yield from _read_row(read_call, calls)) else None


def _next_row(calls: Calls) -> Steps[str | None]:
    yield from calls.blanks_behind()
    return (yield from calls.source.one_of((CALLS_BEGIN,)))


def _read_row(read_call: ReadCall, calls: Calls) -> Steps[bool]:
    source, num_before = calls.source, calls.num_begun
    while True:
        yield from source.blanks()
        mark = yield from source.one_of((CALL_BEGIN, CALLS_END))
        if mark != CALL_BEGIN:
            break
        yield from source.blanks()
        if not (yield from read_call(calls)):
            return False
        yield from source.blanks()
        if (yield from source.one_of((CALL_END,))) is None:
            return False
        calls.tell_marks()
    if mark is None or calls.num_begun == num_before:
        return False
    calls.tell_marks()
    return True


def _read_fenced_call(calls: Calls) -> Steps[bool]:
    source = calls.source
    yield from source.run(NAME_CHARACTERS)  # the kind, which is always `function`
    if (yield from source.one_of((SEPARATOR,))) is None:
        return False
    name = yield from source.run(NAME_CHARACTERS)
    yield from source.blanks()
    if (yield from source.one_of((FENCE_BEGIN,))) is None:
        return False
    yield from source.blanks()
    if not (yield from calls.read_arguments(name)):
        return False
    yield from source.blanks()
    return (yield from source.one_of((FENCE_END,))) is not None


def _read_plain_call(calls: Calls) -> Steps[bool]:
    source = calls.source
    name = yield from source.run(NAME_CHARACTERS)
    if (yield from source.one_of((SEPARATOR,))) is None:
        return False
    yield from source.blanks()
    return (yield from calls.read_arguments(name))


read_v3 = partial(_read, _read_fenced_call)
read_v31 = partial(_read, _read_plain_call)
