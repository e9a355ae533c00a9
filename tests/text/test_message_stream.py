from hypothesis import given, settings
from hypothesis import strategies as st

from onward.text import message_events
from onward.text.message_events import ContentText, ReasoningText, ToolCallArguments, ToolCallEnded, ToolCallStarted
from onward.text.message_parser import MessageParser
from onward.text.reasoning.reasoning_formats import REASONING_FORMATS as REASONING
from onward.text.token_table import TokenTable, with_visible_markers
from onward.text.tool_calls.tool_call_formats import TOOL_CALL_FORMATS
from tests.text.cutting import cut_at, cuts, told

TEXT = (
    "<think>\nWhere is it? <tool_call>\n</think>\n\nI look.\n<tool_call>\n"
    '{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)


def new_stream(max_calls: int | None = None) -> MessageParser:
    return MessageParser(REASONING["qwen3"].parser(False), TOOL_CALL_FORMATS["hermes"].parser(()), max_calls)


def test_thoughts_words_and_calls_come_in_order_and_a_call_within_thoughts_is_a_thought() -> None:
    events = [one for one in told(new_stream(), [TEXT]) if not isinstance(one, message_events.MarkupText)]
    shown = [(type(event), getattr(event, "delta", event.text)) for event in events]
    assert [kind for kind, _ in shown] == [
        ReasoningText,
        ContentText,
        ToolCallStarted,
        ToolCallArguments,
        ToolCallEnded,
        ToolCallStarted,
        ToolCallArguments,
        ToolCallEnded,
    ]
    assert shown[0][1] == "Where is it? <tool_call>\n"
    assert shown[1][1] == "I look.\n"


@settings(max_examples=150, deadline=None)
@given(cuts, st.integers(0, len(TEXT)))
def test_any_cutting_of_a_whole_answer_gives_the_same_story(places: list[int], end: int) -> None:
    text = TEXT[:end]
    events = told(new_stream(), cut_at(text, places))
    assert events == told(new_stream(), list(text))
    assert "".join(event.text for event in events) == text


def test_an_answer_is_over_when_the_last_call_that_may_be_made_has_ended() -> None:
    stream, events = new_stream(max_calls=1), list[message_events.MessageEvent]()
    read = ""
    while not stream.stopped:
        events += stream.push(TEXT[len(read)])
        read += TEXT[len(read)]
    assert read.endswith('"arguments": {"a": 1}')
    assert events[-1] == ToolCallEnded(0, True)
    assert stream.finish() == []
    at_once = new_stream(max_calls=1)
    assert message_events.merge_events(at_once.push(TEXT)) == message_events.merge_events(events)


def test_either_parser_may_be_missing() -> None:
    text = '<think>a</think><tool_call>{"name": "f"}</tool_call>'
    without_calls = told(MessageParser(REASONING["qwen3"].parser(False), None), [text])
    assert without_calls[-1] == ContentText('<tool_call>{"name": "f"}</tool_call>')
    without_thoughts = told(MessageParser(None, TOOL_CALL_FORMATS["hermes"].parser(())), [text])
    assert without_thoughts[0] == ContentText("<think>a</think>")


def test_marks_that_are_special_tokens_are_shown_and_no_others() -> None:
    table = TokenTable([b"a", b"[TOOL_CALLS]", b"</s>"], [1, 2])
    shown = with_visible_markers(table, TOOL_CALL_FORMATS["mistral"].markers)
    assert shown.decode([0, 1, 2]) == "a[TOOL_CALLS]"
    assert table.decode([0, 1, 2]) == "a"
    assert with_visible_markers(table, ["<tool_call>"]) is table
