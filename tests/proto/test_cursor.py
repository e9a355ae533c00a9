import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.proto.cursor import (
    MAX_CHOICES,
    MAX_CURSOR_CHARS,
    ChoiceCursor,
    Cursor,
    format_cursor,
    is_request_id,
    parse_cursor,
    parse_cursor_slow,
)

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
ID = "5f0c9d3e5f0c9d3e5f0c9d3e5f0c9d3e"
request_ids = st.one_of(st.uuids().map(lambda u: u.hex), st.from_regex(r"[A-Za-z0-9_.-]{1,128}", fullmatch=True))
reasons = st.sampled_from(["stop", "length", "abort", "error", "pd_reschedule"])
token_ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)


@st.composite
def cursors(draw: st.DrawFn) -> Cursor:
    choices = draw(
        st.lists(st.builds(ChoiceCursor, st.integers(6, 2**31 - 1), st.none() | reasons), min_size=1, max_size=5)
    )
    return Cursor(
        request_id=draw(request_ids),
        seed=draw(st.integers(-(2**63), 2**64 - 1)),
        attempt_epoch=draw(st.integers(0, 2**63 - 1)),
        choices=choices,
        new_tokens=draw(st.dictionaries(st.integers(0, len(choices) - 1), token_ids)),
        created_s=draw(st.integers(0, 2**37 - 1)),
        trace_id=draw(st.sampled_from(["", TRACE_ID])),
    )


@settings(max_examples=300, deadline=None)
@given(cursors())
def test_a_cursor_comes_back_from_its_line(cursor: Cursor) -> None:
    line = format_cursor(cursor)
    assert parse_cursor(line) == cursor
    assert line.isascii()
    assert line.isprintable()
    assert " " not in line


def test_the_line_is_as_documented() -> None:
    cursor = Cursor(ID, 42, 3, [ChoiceCursor(17), ChoiceCursor(9, "stop")], {0: [19556, 33]}, 1767225600)
    assert format_cursor(cursor) == f"1;{ID};1767225600;42;3;17,9:stop;0:19556+33"
    assert format_cursor(Cursor(ID, 42, 3, [ChoiceCursor(0)])) == f"1;{ID};0;42;3;0;"
    traced = Cursor(ID, 42, 3, [ChoiceCursor(1)], {0: [5]}, 9, trace_id=TRACE_ID)
    assert format_cursor(traced) == f"1;{ID}~{TRACE_ID};9;42;3;1;0:5"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "version"),
        ("2;x", "version"),
        ("1", "7 fields"),
        ("1;a;9;1;1;1", "7 fields"),
        ("1;a;9;1;1;1;;", "7 fields"),
        ("1;;9;1;1;1;", "request id"),
        ("1;a b;9;1;1;1;", "request id"),
        ("1;a\n;9;1;1;1;", "request id"),
        (f"1;{'a' * 129};9;1;1;1;", "request id"),
        ("1;é;9;1;1;1;", "request id"),
        ("1;a~;9;1;1;1;", "trace id"),
        (f"1;a~{TRACE_ID}0;9;1;1;1;", "trace id"),
        (f"1;a~{TRACE_ID.upper()};9;1;1;1;", "trace id"),
        (f"1;~{TRACE_ID};9;1;1;1;", "request id"),
        ("1;a;;1;1;1;", "time of creation"),
        ("1;a;-1;1;1;1;", "time of creation"),
        (f"1;a;{2**37};1;1;1;", "time of creation"),
        ("1;a;9;;1;1;", "seed"),
        ("1;a;9;+1;1;1;", "seed"),
        ("1;a;9;-0;1;1;", "seed"),
        ("1;a;9;01;1;1;", "seed"),
        ("1;a;9;1_0;1;1;", "seed"),
        (f"1;a;9;{2**64};1;1;", "seed"),
        (f"1;a;9;{-(2**63) - 1};1;1;", "seed"),
        ("1;a;9;1;-1;1;", "epoch"),
        ("1;a;9;1;٣;1;", "epoch"),
        ("1;a;9;1;1 ;1;", "epoch"),
        ("1;a;9;1;01;1;", "epoch"),
        (f"1;a;9;1;{2**63};1;", "epoch"),
        ("1;a;9;1;1;01;", "position"),
        ("1;a;9;1;1;1;0:05", "token id"),
        ("1;a;9;1;1;;", "position"),
        ("1;a;9;1;1;1,;", "position"),
        (f"1;a;9;1;1;{2**31};", "position"),
        ("1;a;9;1;1;1:;", "finish reason"),
        ("1;a;9;1;1;1:STOP;", "finish reason"),
        ("1;a;9;1;1;1:stop:x;", "finish reason"),
        ("1;a;9;1;1;" + ",".join(["1"] * (MAX_CHOICES + 1)) + ";", "choices"),
        ("1;a;9;1;1;1;1:5", "choice"),
        ("1;a;9;1;1;1;0", "token ids"),
        ("1;a;9;1;1;1;0:", "token id"),
        ("1;a;9;1;1;1;0:5+", "token id"),
        ("1;a;9;1;1;1;0:-5", "token id"),
        (f"1;a;9;1;1;1;0:{2**31}", "token id"),
        ("1;a;9;1;1;2;0:5,0:6", "twice"),
        ("1;a;9;1;1;1;0:5+6", "more new tokens"),
        ("1;a;9;1;1;9;" + "0:" + "+".join(["5"] * MAX_CURSOR_CHARS), "longer"),
    ],
)
def test_a_malformed_line_is_refused_by_field(line: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        parse_cursor(line)
    assert str(refused.value).isascii()
    assert len(str(refused.value)) < 200


@settings(max_examples=500, deadline=None)
@given(st.one_of(st.text(max_size=80), st.text(alphabet="1a;:,+-0~", max_size=40).map(lambda s: "1;" + s)))
def test_whatever_is_accepted_is_written_the_same_way_again(line: str) -> None:
    try:
        cursor = parse_cursor(line)
    except ValueError:
        return
    assert format_cursor(cursor) == line


def test_request_ids_are_what_a_line_can_carry() -> None:
    assert is_request_id(ID)
    assert is_request_id("my-label_1.2")
    assert not any(map(is_request_id, ["", "a;b", "a b", "a\n", "a" * 129, "é"]))


usual_numbers = st.one_of(
    st.integers(-(2**64), 2**65).map(str), st.sampled_from(["", "00", "01", "-0", "+1", " 1", "1_0", "٣"])
)


@given(
    request_ids,
    usual_numbers,
    usual_numbers,
    usual_numbers,
    usual_numbers,
    usual_numbers,
    st.sampled_from(["", "\n", ",1:2", "+7"]),
)
def test_the_short_way_reads_a_usual_line_as_the_whole_grammar_does(
    request_id: str, created: str, seed: str, epoch: str, position: str, token_id: str, rest: str
) -> None:
    line = f"1;{request_id};{created};{seed};{epoch};{position};0:{token_id}{rest}"
    try:
        expected = parse_cursor_slow(line)
    except ValueError as refusal:
        with pytest.raises(ValueError) as caught:
            parse_cursor(line)
        assert str(caught.value) == str(refusal)
    else:
        assert parse_cursor(line) == expected
