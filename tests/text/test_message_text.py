import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.text.message_events import ContentText, MessageEvent, ReasoningText, ToolCallEnded, merge_events
from onward.text.message_parser import MessageParser
from onward.text.parsed_text_stream import ParsedTextStream
from onward.text.reasoning.reasoning_formats import REASONING_FORMATS as REASONING
from onward.text.text_stream import INTERRUPTED_REASONS, TextStream
from onward.text.token_table import TokenTable, with_visible_markers
from onward.text.tool_calls.tool_call_formats import TOOL_CALL_FORMATS

PIECES = [
    b"[TOOL_CALLS]", b"[ARGS]", b"[THINK]", b"[/THINK]", b"</s>", b"f", b"{", b"}", b'{"a": ', b'"', "é".encode()[:1],
    "é".encode()[1:], b"1", b"hm", b"\n", b"[", b"STOP",
]  # fmt: skip
SPECIAL = range(5)
CALLS, THOUGHTS = TOOL_CALL_FORMATS["mistral"], REASONING["mistral"]
TABLE = with_visible_markers(TokenTable(PIECES, SPECIAL), CALLS.markers + THOUGHTS.markers)
IDS = {piece: token_id for token_id, piece in enumerate(PIECES)}
WHOLE = [b"[THINK]", b"hm", b"[/THINK]", b"\n", b"hm", b"[TOOL_CALLS]", b"f", b'{"a": ', b"1", b"}", b"[TOOL_CALLS]"]
tokens = st.lists(st.integers(0, len(PIECES) - 1), max_size=24) | st.lists(
    st.sampled_from([b"[TOOL_CALLS]", b"f", b"[ARGS]", b'{"a": ', b"1", b"}", b"hm", b"\n"]).map(IDS.__getitem__),
    max_size=24,
)


def new_text(max_calls: int | None = None, begins_inside: bool = False) -> ParsedTextStream:
    message = MessageParser(THOUGHTS.parser(begins_inside), CALLS.parser(()), max_calls)
    return ParsedTextStream(TextStream(TABLE, stop=("STOP",), end_token_ids=[4]), message)


def push_all(text: ParsedTextStream, token_ids: list[int]) -> list[MessageEvent]:
    """Told by these tokens, up to where the output stops."""
    for token_id in token_ids:
        if text.stopped:
            break
        text.push(token_id)
    return text.take_events()


@settings(max_examples=400, deadline=None)
@given(tokens, st.integers(0, 24), st.sampled_from([None, 1]), st.booleans(), st.sampled_from(["stop", "length"]))
def test_cut_at_any_token_and_replayed_the_rest_is_told_as_if_nothing_had_happened(
    token_ids: list[int], cut: int, max_calls: int | None, begins_inside: bool, reason: str
) -> None:
    undisturbed = new_text(max_calls, begins_inside)
    before = push_all(undisturbed, token_ids[:cut])
    behind = push_all(undisturbed, token_ids[cut:])
    undisturbed.finish(reason)
    end = undisturbed.take_events()

    resumed = new_text(max_calls, begins_inside)
    assert push_all(resumed, token_ids[:cut]) == before
    assert push_all(resumed, token_ids[cut:]) == behind
    resumed.finish(reason)
    assert resumed.take_events() == end
    assert resumed.num_tool_calls == undisturbed.num_tool_calls
    assert resumed.num_reasoning_tokens == undisturbed.num_reasoning_tokens

    at_once = new_text(max_calls, begins_inside)
    told = push_all(at_once, token_ids)
    at_once.finish(reason)
    assert merge_events(told + at_once.take_events()) == merge_events(before + behind + end)


@settings(max_examples=200, deadline=None)
@given(tokens, st.sampled_from(["stop", "length"]))
def test_all_that_is_shown_is_accounted_for(token_ids: list[int], reason: str) -> None:
    text, plain = new_text(), TextStream(TABLE, stop=("STOP",), end_token_ids=[4])
    shown = ""
    for token_id in token_ids:
        if plain.stopped:
            break
        shown += plain.push(token_id)
    shown += plain.finish(reason)
    events = push_all(text, token_ids)
    text.finish(reason)
    assert "".join(event.text for event in events + text.take_events()) == shown


def test_marks_that_are_special_tokens_make_calls_and_thoughts_and_other_special_tokens_stay_hidden() -> None:
    text = new_text()
    events = push_all(text, [IDS[piece] for piece in [*WHOLE[:-1], b"</s>"]])
    assert [event.text for event in events if isinstance(event, ReasoningText)] == ["hm"]
    assert [event.text for event in events if isinstance(event, ContentText)] == ["hm"]
    assert text.num_tool_calls == 1


def test_an_output_of_one_call_stops_with_the_token_that_ends_it() -> None:
    text = new_text(max_calls=1)
    events = push_all(text, [IDS[piece] for piece in WHOLE])
    assert text.stopped
    assert events[-1] == ToolCallEnded(0, True)
    assert text.finish("stop") == ""
    assert text.take_events() == []


@pytest.mark.parametrize("reason", sorted(INTERRUPTED_REASONS))
def test_an_output_that_was_cut_keeps_what_was_held_back(reason: str) -> None:
    text = new_text()
    push_all(text, [IDS[b"["]])
    assert text.finish(reason) == ""
    assert text.take_events() == []


@pytest.mark.parametrize(
    ("pieces", "begins_inside", "reason", "num_thought"),
    [
        (["[THINK]", "hm", "1", "[/THINK]", "hm"], False, "stop", 2),
        (["[THINK]", "\n", "hm", "\n", "[/THINK]"], False, "stop", 2),
        (["hm", "[/THINK]", "hm"], True, "stop", 1),
        (["\n", "hm"], True, "length", 1),
        (["hm", "[THINK]", "hm"], False, "stop", 0),
        (["[THINK]", "[/THINK]", "hm"], False, "stop", 0),
        (["[THINK]", "hm", "[", "1", "[/THINK]"], False, "stop", 3),
        (["[THINK]", "hm", "["], False, "length", 2),
        (["[THINK]", "hm", "["], False, "abort", 1),
    ],
)
def test_tokens_that_are_told_as_thinking_are_counted_and_tags_are_not(
    pieces: list[str], begins_inside: bool, reason: str, num_thought: int
) -> None:
    text = new_text(begins_inside=begins_inside)
    push_all(text, [IDS[piece.encode()] for piece in pieces])
    text.finish(reason)
    assert text.num_reasoning_tokens == num_thought


def test_half_a_character_counts_with_what_it_becomes() -> None:
    text = new_text()
    halves = [IDS["é".encode()[:1]], IDS["é".encode()[1:]]]
    push_all(text, [IDS[b"[THINK]"], *halves, IDS[b"[/THINK]"], *halves])
    assert text.num_reasoning_tokens == 2


def test_where_no_thinking_is_looked_for_none_is_counted() -> None:
    message = MessageParser(None, CALLS.parser(()))
    text = ParsedTextStream(TextStream(TABLE), message)
    text.push(IDS[b"hm"])
    assert text.num_reasoning_tokens is None


def test_tokens_of_what_may_become_a_call_or_a_tag_are_not_covered() -> None:
    text = new_text()
    said = [b"hm", b"\n", b"[TOOL_CALLS]", b"f"]
    covered: list[int] = []
    for num_tokens in range(len(said)):
        text.push(IDS[said[num_tokens]])
        covered.append(text.num_emitted_tokens([IDS[piece] for piece in said[: num_tokens + 1]]))
    assert covered[0] == 1 and covered[2:] == [covered[2]] * 2, "a name may go on"
    assert covered[2] <= 3
