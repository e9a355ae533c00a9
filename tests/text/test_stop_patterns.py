"""The first match of a stop pattern, by its definition, however the text is cut."""

import re
import sys
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onward.errors import InvalidRequest
from onward.text.stop_matcher import StopMatcher, new_stop_matcher
from onward.text.stop_patterns import MAX_MATCH_CHARS, MAX_STATES, MAX_STOP_PATTERNS, StopPatterns

PATTERNS = [
    "a", "ab?c", "[a-c]{2}é", "(?:ab|b{1,3})c", "a.{1,2}b", "[^a]b", r"\dc", r"\W\w", "(a|b(c|é)){2}", "a{0,3}b", "ba??c",
    r"[^\s\d]é", "(a|ab)(c|bcé)", r"\S\D", r"[^b-zc-d\d]1", r"[\n1a-bé]{2}c", "(?:||ab||)c",
]  # fmt: skip
pieces_of_text = st.lists(st.text(alphabet="abcé1 \n", max_size=5), max_size=12)
some_patterns = st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3, unique=True)
some_strings = st.lists(st.text(alphabet="abcé", min_size=1, max_size=4), max_size=2)


def matcher_of(patterns: list[str], strings: list[str]) -> StopMatcher:
    matcher = new_stop_matcher(strings, StopPatterns(patterns))
    assert matcher is not None
    return matcher


def first_match(text: str, patterns: list[str], strings: list[str]) -> tuple[str, str] | None:
    """By definition: the first place where a match ends, and the longest that ends there."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            found = text[start:end]
            if found in strings or any(re.fullmatch(pattern, found) for pattern in patterns):
                return text[:start], found
    return None


@settings(max_examples=600, deadline=None)
@given(pieces_of_text, some_patterns, some_strings)
@example(["ab", "bc", "é"], ["(a|ab)(c|bcé)"], [])
@example(["a", "b"], ["a.{1,2}b"], ["ab"])
def test_the_result_is_the_definitions_however_the_text_is_cut(
    pieces: list[str], patterns: list[str], strings: list[str]
) -> None:
    matcher, released = matcher_of(patterns, strings), ""
    for piece in pieces:
        released += matcher.push(piece)
        if matcher.matched is not None:
            break
    text = "".join(pieces)
    expected = first_match(text, patterns, strings)
    if expected is None:
        assert matcher.matched is None
        assert released + matcher.held == text
        assert released + matcher.flush() == text
    else:
        assert (released, matcher.matched) == expected
        assert matcher.reported in [*patterns, *strings]


@settings(max_examples=300, deadline=None)
@given(pieces_of_text, some_patterns, some_strings)
def test_released_text_does_not_depend_on_the_pieces_and_is_in_no_later_match(
    pieces: list[str], patterns: list[str], strings: list[str]
) -> None:
    whole, cut = matcher_of(patterns, strings), matcher_of(patterns, strings)
    for count, piece in enumerate(pieces, 1):
        released = cut.push(piece)
        if cut.matched is not None:
            break
        assert cut.held == "".join(pieces[:count])[len("".join(pieces[:count])) - len(cut.held) :]
        assert whole.push(piece) == released


def test_a_match_that_ends_too_early_does_not_count_and_one_that_ends_later_does() -> None:
    for strings in ([], ["zz"]):
        matcher = matcher_of(["a{1,2}b"], strings)
        assert matcher.push_ignoring_matches("xabaa") == "xab"
        assert matcher.push("by") == ""
        assert matcher.matched == "aab"


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("a*", "empty text"),
        ("a+", "longest match"),
        ("a{3,}", "longest match"),
        ("a{300}", f"at most {MAX_MATCH_CHARS} characters"),
        ("(a|)", "empty text"),
        ("^a", "anchors"),
        ("a$", "anchors"),
        (r"\ba", "anchors"),
        ("a(?=b)", "look-around"),
        ("(?<!b)a", "look-around"),
        (r"(a)\1", "references"),
        ("(?i)a", "flags"),
        ("(?i:a)b", "flags"),
        ("(?>ab)c", "not supported"),
        ("a{1,2}+b", "not supported"),
        ("(a", "is not a regular expression"),
        ("[", "is not a regular expression"),
        ("a" * 513, "at most 512 characters"),
        ("(" * 300 + "a" + ")" * 300, "at most 512 characters"),
        ("(ab|cd){110}", "states"),
        ("((((a{4}){4}){4}){4}b){1,3}", "longest match"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused_with_its_place(pattern: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(problem)) as refused:
        StopPatterns(["ok", pattern])
    assert refused.value.param == "stop_regex[1]"


def test_there_are_at_most_so_many_patterns() -> None:
    StopPatterns(["a"] * MAX_STOP_PATTERNS)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_STOP_PATTERNS} patterns"):
        StopPatterns(["a"] * (MAX_STOP_PATTERNS + 1))


def test_repeats_of_nothing_cost_nothing() -> None:
    assert len(StopPatterns(["((()" + "{255}){255}){255}a"]).states) < 10


def calls_of(work: Callable[[], object]) -> int:
    """Returns how many functions `work` calls."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("repeated", ["[%sa-z]{%d}", "(?:%s){0,%d}b"])
def test_the_work_for_a_character_is_bounded_by_the_states_whatever_the_size_of_sets_and_branches(
    repeated: str,
) -> None:
    members = "".join(map(chr, range(0x400, 0x400 + 400)))
    parts = (members, 120) if "[" in repeated else ("|" * 400, 50)
    patterns = StopPatterns([repeated % parts, "y"])
    matcher = new_stop_matcher((), patterns)
    assert matcher is not None
    matcher.push("x" * 118)
    assert calls_of(lambda: matcher.push("x")) < 20 * MAX_STATES


def test_the_repeats_of_a_set_share_it() -> None:
    def calls(times: int) -> int:
        return calls_of(lambda: StopPatterns([f"[{''.join(map(chr, range(0x400, 0x400 + 400)))}a-z]{{{times}}}"]))

    assert calls(100) - calls(1) < 100 * 20


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_a_pattern_or_is_refused(pattern: str) -> None:
    try:
        patterns = StopPatterns([pattern])
    except InvalidRequest as error:
        assert error.param == "stop_regex[0]"
    else:
        new_stop_matcher((), patterns).push("some text, 123\n")  # type: ignore[union-attr]
