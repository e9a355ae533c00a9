"""The input of a custom tool is decoded while its arguments arrive, however they are cut."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.text.message_events import CustomToolInput, MessageEvent, ToolCallArguments, ToolCallEnded, ToolCallStarted
from onward.text.tool_calls.custom_input import CustomCallConverter, InputDecoder

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def decoded(pieces: list[str]) -> str:
    decoder = InputDecoder()
    return "".join([*map(decoder.push, pieces), decoder.finish()])


@given(TEXTS, st.booleans(), st.sampled_from([None, 1]))
def test_an_input_is_decoded_in_any_pieces(text: str, ascii_only: bool, indent: int | None) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only, indent=indent)
    assert decoded([arguments]) == decoded(list(arguments)) == text
    for at in range(len(arguments)):
        assert decoded([arguments[:at], arguments[at:]]) == text


@given(TEXTS, st.integers(0, 60))
def test_what_is_known_of_a_cut_input_begins_it(text: str, at: int) -> None:
    arguments = json.dumps({"input": text})
    decoder = InputDecoder()
    assert text.startswith("".join(map(decoder.push, arguments[:at])))


@pytest.mark.parametrize("arguments", ["{}", '{"patch": "x"}', '{"input": 7}', '{"inputs": "x"}', "[1]", '{"in', ""])
def test_arguments_of_another_form_are_the_input_themselves(arguments: str) -> None:
    assert decoded([arguments]) == decoded(list(arguments)) == arguments


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        ("\\ud83d\\ude00", "😀"),
        ("\\ud83dx", "\ufffdx"),
        ("\\ud83d\\n", "\ufffd\n"),
        ("\\ud83d\\u0041", "\ufffdA"),
        ("\\ude00", "\ufffd"),
        ("\\/\\b\\f\\r\\t", "/\b\f\r\t"),
    ],
)
def test_escapes_become_characters_and_half_a_pair_a_replacement(escaped: str, text: str) -> None:
    arguments = f'{{"input": "{escaped}"}}'
    assert decoded([arguments]) == decoded(list(arguments)) == text


def test_only_calls_of_custom_tools_are_changed_and_no_text_is_lost() -> None:
    events: list[MessageEvent] = [
        ToolCallStarted(0, "f", "<f"),
        ToolCallArguments(0, '{"input": "x"}', '{"input": "x"}'),
        ToolCallEnded(0, True),
        ToolCallStarted(1, "p", "<p"),
        ToolCallArguments(1, '{"in', '{"in'),
        ToolCallEnded(1, False, "!"),
    ]
    converted = CustomCallConverter({"p"}).convert(events)
    assert converted[:3] == events[:3]
    assert converted[3:] == [
        ToolCallStarted(1, "p", "<p", is_custom=True),
        CustomToolInput(1, "", '{"in'),
        CustomToolInput(1, '{"in', ""),
        ToolCallEnded(1, False, "!"),
    ]
    assert "".join(event.text for event in converted) == "".join(event.text for event in events)
