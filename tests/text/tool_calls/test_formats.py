import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onward.text.incremental_parser import MAX_HELD_CHARS, IncrementalParser
from onward.text.message_events import ContentText, MessageEvent, ToolCallArguments, ToolCallEnded, ToolCallStarted
from onward.text.tool_calls.json_reader import MAX_DEPTH
from onward.text.tool_calls.tool_call_formats import TOOL_CALL_FORMATS
from tests.text.cutting import check_any_cutting, cuts, told
from tests.text.tool_calls import spelling
from tests.text.tool_calls.spelling import NAMES, SPELLINGS, Call

JSON_SCRAPS = [*'{}[]",:\\ue-+.0123 \n\ttrufalsn/\x01é', '"a":', '{"a":']

every_format = pytest.mark.parametrize("name", sorted(TOOL_CALL_FORMATS))
every_spelling = pytest.mark.parametrize(("name", "spell"), SPELLINGS, ids=lambda one: getattr(one, "__name__", one))


def parser_of(name: str) -> IncrementalParser:
    return TOOL_CALL_FORMATS[name].parser(NAMES)


def calls_in(events: list[MessageEvent]) -> list[tuple[str, str, bool]]:
    """Name, JSON text of the arguments, whether they are whole."""
    calls: list[tuple[str, str, bool]] = []
    for event in events:
        match event:
            case ToolCallStarted(index, name):
                assert index == len(calls)
                calls.append((name, "", False))
            case ToolCallArguments(index, delta):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + delta, False)
            case ToolCallEnded(index, is_complete):
                assert index == len(calls) - 1
                calls[index] = (*calls[index][:2], is_complete)
            case _:
                pass
    return calls


def words_in(events: list[MessageEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentText))


def read(name: str, text: str) -> tuple[list[tuple[str, str, bool]], str]:
    events = told(parser_of(name), [text])
    return calls_in(events), words_in(events)


@every_spelling
@settings(max_examples=40, deadline=None)
@given(spelling.calls, cuts, st.sampled_from(["", "Let me see.\n\n"]), st.sampled_from(["", "\n", " \n"]))
def test_calls_are_found_as_they_were_meant_however_the_text_is_cut(
    name: str,
    spell: Callable[[Sequence[Call]], str],
    calls: list[Call],
    places: list[int],
    before: str,
    behind: str,
) -> None:
    before = before if name in spelling.WITH_TEXT_BEFORE else ""
    events = check_any_cutting(lambda: parser_of(name), before + spell(calls) + behind, places)
    found = calls_in(events)
    assert [(name, json.loads(arguments)) for name, arguments, _ in found] == calls
    assert all(is_complete for *_, is_complete in found)
    assert words_in(events) == before


@every_format
@settings(max_examples=150, deadline=None)
@given(spelling.nearly_calls | st.text(max_size=30), cuts)
def test_no_character_of_any_text_is_lost_and_whole_arguments_are_json(name: str, text: str, places: list[int]) -> None:
    events = check_any_cutting(lambda: parser_of(name), text, places)
    for _, arguments, is_complete in calls_in(events):
        if is_complete:
            assert isinstance(json.loads(arguments), dict)
        else:
            with pytest.raises(json.JSONDecodeError):
                json.loads(arguments)


@every_spelling
@settings(max_examples=15, deadline=None)
@given(spelling.calls)
def test_at_every_character_a_beginning_of_the_calls_has_been_told_and_no_words(
    name: str, spell: Callable[[Sequence[Call]], str], calls: list[Call]
) -> None:
    text = spell(calls)
    whole, _ = read(name, text)
    parser, events = parser_of(name), list[MessageEvent]()
    for character in text:
        events += parser.push(character)
        assert not words_in(events)
        for (name_told, arguments, _), (call_name, call_arguments, _) in zip(calls_in(events), whole, strict=False):
            assert name_told == call_name
            assert call_arguments.startswith(arguments)
    assert calls_in(events) == whole


@every_spelling
@settings(max_examples=15, deadline=None)
@given(spelling.calls, st.integers(0, 300))
def test_cut_anywhere_and_replayed_the_story_goes_on_as_if_nothing_had_happened(
    name: str, spell: Callable[[Sequence[Call]], str], calls: list[Call], place: int
) -> None:
    text = spell(calls)
    undisturbed = parser_of(name)
    undisturbed.push(text[:place])
    resumed = parser_of(name)
    for character in text[:place]:
        resumed.push(character)
    for character in text[place:]:
        assert resumed.push(character) == undisturbed.push(character)
    assert resumed.finish() == undisturbed.finish()


@every_format
def test_plain_words_pass_at_once(name: str) -> None:
    parser = parser_of(name)
    for word in ("Hello", " wor", "ld", " 1 > 0", "\n", "bye"):
        assert parser.push(word) == [ContentText(word)]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("name", "spell"), [one for one in SPELLINGS if one[0] != "pythonic"], ids=lambda one: getattr(one, "__name__", one)
)
def test_arguments_are_streamed_as_they_come(name: str, spell: Callable[[Sequence[Call]], str]) -> None:
    text = spell([("f", {"city": "Paris", "a": [1, 2]})])
    parser = parser_of(name)
    deltas = [one.delta for piece in text for one in parser.push(piece) if isinstance(one, ToolCallArguments)]
    assert "".join(deltas) == '{"city": "Paris", "a": [1, 2]}'
    assert max(map(len, deltas)) == 1


@pytest.mark.parametrize(
    ("name", "text", "calls", "words"),
    [
        ("hermes", "<tool_call>no json</tool_call>", [], "<tool_call>no json</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', [], '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "argu', [], '<tool_call>{"name": "f", "argu'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a"; 1}}', [("f", '{"a"', False)], "; 1}}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>', [("f", "{}", True)], "}</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', [("f", '{"a": 1', False)], ""),
        ("hermes", '<tool_call>{"name":"f"}<tool_call>{"name":"g"}', [("f", "{}", True), ("g", "{}", True)], ""),
        ("hermes", '<tool_call><tool_call>{"name":"f"}</tool_call>', [("f", "{}", True)], "<tool_call>"),
        ("hermes", '<tool_<tool_call>{"name":"f"}</tool_call>', [("f", "{}", True)], "<tool_"),
        ("hermes", '<tool_call>{"name":"a b"}</tool_call>', [], '<tool_call>{"name":"a b"}</tool_call>'),
        ("hermes", '<tool_call>{"name":"f","arguments":null}</tool_call>', [("f", "{}", True)], ""),
        ("llama3_json", '{"name": "f", "parameters": {}}', [("f", "{}", True)], ""),
        ("llama3_json", '{"name": "Bob", "age": 3}', [], '{"name": "Bob", "age": 3}'),
        ("llama3_json", 'Like this: {"name": "f"}', [], 'Like this: {"name": "f"}'),
        ("llama3_json", "<|python_tag|>print(1)", [], "<|python_tag|>print(1)"),
        ("json", '```json\n[{"name": "f"}]\n```', [("f", "{}", True)], ""),
        ("json", '{"name": "f"}\n{"name": "f"}', [("f", "{}", True), ("f", "{}", True)], ""),
        ("json", "[1, 2]", [], "[1, 2]"),
        ("mistral", "[TOOL_CALLS]f no", [], "[TOOL_CALLS]f no"),
        ("mistral", "[TOOL_CALLS][]", [], "[TOOL_CALLS][]"),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
            [],
            "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
        ),
        ("pythonic", "[f(a=b)]", [], "[f(a=b)]"),
        ("pythonic", "[1, 2]", [], "[1, 2]"),
        ("pythonic", "<|python_start|>[f(a=-1.5e3)]<|python_end|>", [("f", '{"a": -1500.0}', True)], ""),
    ],
)
def test_what_is_no_call_is_words_from_where_it_stops_being_one(
    name: str, text: str, calls: list[Any], words: str
) -> None:
    assert read(name, text) == (calls, words)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", ' \n<tool_call>{"name": "f"}</tool_call>\n\n%s'),
        ("hermes", '<tool_call>{"name": "f"} \n%s'),
        ("llama3_json", ' {"name": "f"}\n%s'),
        ("mistral", "[TOOL_CALLS]f{}\n%s"),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>\n%s",
        ),
        ("json", '[{"name": "f"}]\n%s'),
        ("json", '```\n{"name": "f"}\n```\n%s'),
        ("pythonic", "[f()]\n%s"),
    ],
)
@pytest.mark.parametrize("words", ["", "Done.\n", "<b>Done", "[1]"])
def test_blanks_around_calls_belong_to_them(name: str, text: str, words: str) -> None:
    assert read(name, text % words) == ([("f", "{}", True)], words)


def test_arguments_before_the_name_and_arguments_in_a_string_are_told_too() -> None:
    first = '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'
    second = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert read("hermes", first) == ([("f", '{"a": 1}', True)], "")
    assert read("hermes", second) == ([("f", '{"a": 1}', True)], "")
    no_object = '<tool_call>{"name": "f", "arguments": "a"}</tool_call>'
    assert read("hermes", no_object) == ([], no_object)


def test_a_beginning_that_is_held_for_too_long_becomes_words() -> None:
    fits = '<tool_call>{"arguments": {"a": "%s"}, "name": "f"}</tool_call>'
    room = MAX_HELD_CHARS - len(fits % "") + len("</tool_call>")
    assert read("hermes", fits % ("x" * room)) == ([("f", json.dumps({"a": "x" * room}), True)], "")
    for num_more in (1, MAX_HELD_CHARS):
        too_long = fits % ("x" * (room + num_more))
        assert read("hermes", too_long) == ([], too_long)
    check_any_cutting(lambda: parser_of("hermes"), too_long, [MAX_HELD_CHARS - 1, MAX_HELD_CHARS, MAX_HELD_CHARS + 1])


def test_behind_what_was_held_for_too_long_the_next_call_is_found() -> None:
    text = '<tool_call>{"arguments": {"a": "' + "x" * MAX_HELD_CHARS + '<tool_call>{"name": "f"}</tool_call>'
    events = check_any_cutting(lambda: parser_of("hermes"), text, [MAX_HELD_CHARS])
    assert calls_in(events) == [("f", "{}", True)]


def test_streamed_arguments_may_be_of_any_length() -> None:
    arguments = json.dumps({"a": "x" * 2 * MAX_HELD_CHARS})
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert read("hermes", text) == ([("f", arguments, True)], "")


def test_arguments_that_are_nested_too_deeply_end_the_call() -> None:
    def nested(depth: int) -> str:
        return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)

    assert read("mistral", f"[TOOL_CALLS]f{nested(MAX_DEPTH)}") == ([("f", nested(MAX_DEPTH), True)], "")
    [(_, _, is_complete)], words = read("mistral", f"[TOOL_CALLS]f{nested(MAX_DEPTH + 1)}")
    assert not is_complete
    assert words == "{}" + "}" * MAX_DEPTH


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(JSON_SCRAPS), max_size=14).map("".join).map(str.lstrip))
@example('{"a":-0.5E+3}')
@example('{"a":01}')
@example('{"a":"\\u00e9\\/"}')
def test_arguments_are_whole_exactly_where_the_json_of_the_standard_library_says_so(text: str) -> None:
    found, words = read("mistral", "[TOOL_CALLS]f[ARGS]" + text)
    try:
        value, end = json.JSONDecoder(parse_constant=_refuse).raw_decode(text)
    except (json.JSONDecodeError, ValueError):
        value, end = None, 0
    if isinstance(value, dict):
        assert found[0] == ("f", text[:end], True)
        assert words.strip(" \n\t") == text[end:].strip(" \n\t")
    else:
        assert all(not is_complete for *_, is_complete in found)


def _refuse(constant: str) -> None:
    raise ValueError(constant)
