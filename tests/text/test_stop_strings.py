import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onward.errors import InvalidRequest
from onward.text.stop_strings import MAX_STOP_CHARS, MAX_STOP_STRINGS, StopStringMatcher

few_letters = st.text(alphabet="abcé", max_size=6)
stops = st.lists(st.text(alphabet="abcé", min_size=1, max_size=5), min_size=1, max_size=4)
chunks = st.lists(few_letters, max_size=12)


def first_match(text: str, stop: list[str]) -> tuple[str, str] | None:
    """By definition: the first place where a stop string ends; the longest that ends there."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return None


def num_held(text: str, stop: list[str]) -> int:
    """By definition: the longest end of the text that begins a stop string and is not yet one."""
    return max(n for n in range(len(text) + 1) if n == 0 or any(text.endswith(s[:n]) and n < len(s) for s in stop))


def run(pieces: list[str], stop: list[str]) -> tuple[str, StopStringMatcher]:
    matcher = StopStringMatcher(stop)
    released = ""
    for piece in pieces:
        released += matcher.push(piece)
        if matcher.matched is not None:
            break
    return released, matcher


@settings(max_examples=1000, deadline=None)
@given(chunks, stops)
@example(["ab", "ab", "c"], ["abab", "babc", "c"])
@example(["aab"], ["aaab", "ab"])
def test_the_result_is_the_definitions_however_the_text_is_cut(pieces: list[str], stop: list[str]) -> None:
    released, matcher = run(pieces, stop)
    text = "".join(pieces)
    expected = first_match(text, stop)
    if expected is None:
        assert matcher.matched is None
        assert released == text[: len(text) - num_held(text, stop)]
        assert released + matcher.flush() == text
    else:
        assert (released, matcher.matched) == expected


@settings(max_examples=300, deadline=None)
@given(chunks, stops)
def test_a_match_is_reported_with_the_piece_that_completes_it(pieces: list[str], stop: list[str]) -> None:
    matcher = StopStringMatcher(stop)
    for count, piece in enumerate(pieces, start=1):
        matcher.push(piece)
        expected = first_match("".join(pieces[:count]), stop)
        assert (matcher.matched is not None) == (expected is not None)
        if expected:
            return


@settings(max_examples=500, deadline=None)
@given(chunks, chunks, stops)
@example(["ab"], ["c"], ["abc"])
@example(["abc"], ["d"], ["abc", "bcd"])
def test_a_stop_string_may_begin_but_not_end_where_it_is_passed_over(
    passed: list[str], pieces: list[str], stop: list[str]
) -> None:
    matcher = StopStringMatcher(stop)
    released = "".join(map(matcher.push_ignoring_matches, passed))
    before, text = "".join(passed), "".join(passed + pieces)
    assert released == before[: len(before) - num_held(before, stop)]
    for piece in pieces:
        released += matcher.push(piece)
        if matcher.matched is not None:
            break
    ends = [(end, s) for end in range(len(before) + 1, len(text) + 1) for s in stop if text[:end].endswith(s)]
    if not ends:
        assert released + matcher.flush() == text
        return
    first_end = min(end for end, _ in ends)
    longest = max((s for end, s in ends if end == first_end), key=len)
    assert matcher.matched == longest
    assert released == text[: first_end - len(longest)]


def test_text_that_cannot_become_a_stop_string_is_not_held_back() -> None:
    matcher = StopStringMatcher(["\n\n", "User:"])
    assert [matcher.push(t) for t in ("Hi", "\n", "you", " Us", "ed", "U", "ser", ":x")] == [
        "Hi", "", "\nyou", " ", "Used", "", "", "",
    ]  # fmt: skip
    assert matcher.matched == "User:"


@pytest.mark.parametrize("stop", [[""], ["ok", ""], ["x"] * (MAX_STOP_STRINGS + 1), ["x" * (MAX_STOP_CHARS + 1)]])
def test_stop_strings_out_of_bounds_are_refused_by_field(stop: list[str]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        StopStringMatcher(stop)
    assert refused.value.param == "stop"


def test_stop_strings_at_the_bounds_work() -> None:
    stop = [chr(ord("a") + i) * MAX_STOP_CHARS for i in range(MAX_STOP_STRINGS)]
    released, matcher = run(["b"] * (MAX_STOP_CHARS + 3), stop)
    assert (released, matcher.matched) == ("", stop[1])
