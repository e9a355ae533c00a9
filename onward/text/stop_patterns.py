"""Finds the first match of a regular expression in a text that arrives in pieces.

A text is read character by character, as by `stop_strings`: the first character that completes a match ends the text, and
of the matches that end there the longest counts. So the result depends on the text alone. Text that may yet become a match
is held back, so a match has a maximum length: patterns without one, and patterns that match nothing, are refused.

The patterns have Python's syntax without anchors, look-around, references and flags. They are matched by following all
alternatives at once, so the time per character is bounded by the number of states.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from onward.errors import InvalidRequest

MAX_STOP_PATTERNS = 16
MAX_PATTERN_CHARS = 512
MAX_MATCH_CHARS = 256
MAX_STATES = 128
"""States of all patterns of a request together. Each choice of the request follows up to so many for each character."""

Accepts = Callable[[str], bool]
_parser: Any = re._parser  # type: ignore[attr-defined]  # the standard library's own parser, of which there is no public form
_CATEGORIES: dict[str, Accepts] = {
    "DIGIT": str.isdecimal,
    "SPACE": str.isspace,
    "WORD": lambda character: character.isalnum() or character == "_",
}


class _CharacterSet:
    """Whether a character is in a set. The time grows with the logarithm of the set's size."""

    __slots__ = ("_categories", "_is_negated", "_lasts", "_literals", "_starts")

    def __init__(self, members: Any) -> None:
        """`members` are the items of a set in the form that the standard library's parser returns."""
        literals, ranges, categories = set[int](), list[tuple[int, int]](), set[tuple[Accepts, bool]]()
        self._is_negated = str(members[0][0]) == "NEGATE"
        for kind, value in members[self._is_negated :]:
            match str(kind):
                case "LITERAL":
                    literals.add(value)
                case "RANGE":
                    ranges.append(value)
                case _:
                    _, _, name = str(value).partition("CATEGORY_")
                    categories.add((_CATEGORIES[name.removeprefix("NOT_")], not name.startswith("NOT_")))
        self._literals, self._categories = frozenset(literals), tuple(categories)
        self._starts, self._lasts = list[int](), list[int]()
        for start, last in sorted(ranges):
            if self._lasts and start <= self._lasts[-1]:
                self._lasts[-1] = max(self._lasts[-1], last)
            else:
                self._starts.append(start)
                self._lasts.append(last)

    def __call__(self, character: str) -> bool:
        return self._has(character) != self._is_negated

    def _has(self, character: str) -> bool:
        code = ord(character)
        if code in self._literals:
            return True
        index = bisect_right(self._starts, code) - 1
        if index >= 0 and code <= self._lasts[index]:
            return True
        return any(accepts(character) == expected for accepts, expected in self._categories)


@dataclass(frozen=True, slots=True)
class _Character:
    """A state that reads one character."""

    accepts: Accepts
    following: int


@dataclass(frozen=True, slots=True)
class _Branch:
    """A state that reads nothing, and continues as each of several."""

    following: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Match:
    pattern: str


class StopPatterns:
    """Compiled patterns."""

    def __init__(self, patterns: Sequence[str], path: str = "stop_regex") -> None:
        """Raises `InvalidRequest`, which names `path`, for patterns that cannot be used."""
        if len(patterns) > MAX_STOP_PATTERNS:
            raise _refused(path, f"at most {MAX_STOP_PATTERNS} patterns, got {len(patterns)}")
        self.states: list[_Character | _Branch | _Match] = []
        self._acceptors: dict[int, Accepts] = {}
        """By the parsed item, of the pattern that is being compiled, so that its repeats share one."""
        starts = [self._compile(pattern, f"{path}[{index}]") for index, pattern in enumerate(patterns)]
        self.first: list[int] = self.closure(self._add(_Branch(tuple(starts)), path), set())
        """The states in which a match begins."""

    def closure(self, state_index: int, seen: set[int]) -> list[int]:
        """Returns the states that are reached without reading a character and are no branches themselves, except those
        that were `seen` before."""
        found: list[int] = []
        waiting = [state_index]
        while waiting:
            reached = waiting.pop()
            if reached in seen:
                continue
            seen.add(reached)
            state = self.states[reached]
            if isinstance(state, _Branch):
                waiting.extend(state.following)
            else:
                found.append(reached)
        return found

    def _compile(self, pattern: str, path: str) -> int:
        parsed = _parse(pattern, path)
        shortest, longest = parsed.getwidth()
        if shortest == 0:
            raise _refused(path, "must not match the empty text")
        if longest > MAX_MATCH_CHARS:
            raise _refused(path, f"must have a longest match, of at most {MAX_MATCH_CHARS} characters")
        self._acceptors = {}
        start = self._sequence(parsed, self._add(_Match(pattern), path), path)
        self._acceptors = {}
        return start

    def _add(self, state: _Character | _Branch | _Match, path: str) -> int:
        if len(self.states) >= MAX_STATES:
            raise _refused(path, f"is too large: the patterns of a request may have {MAX_STATES} states")
        self.states.append(state)
        return len(self.states) - 1

    def _sequence(self, items: Any, following: int, path: str) -> int:
        """Adds the states of a sequence, from its end, and returns its first state."""
        for operation, value in reversed(list(items)):
            following = self._item(str(operation), value, following, path)
        return following

    def _item(self, operation: str, value: Any, following: int, path: str) -> int:
        match operation:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return self._add(_Character(self._acceptor(operation, value), following), path)
            case "BRANCH":
                starts = [self._sequence(items, following, path) for items in value[1]]
                return self._add(_Branch(tuple(dict.fromkeys(starts))), path)
            case "SUBPATTERN" if not (value[1] or value[2]):
                return self._sequence(value[3], following, path)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, items = value
                return self._repeat(least, most, items, following, path)
            case _:
                name = operation.lower().replace("_", " ")
                raise _refused(path, f"anchors, look-around, references and flags are not supported, got: {name}")

    def _acceptor(self, operation: str, value: Any) -> Accepts:
        if operation != "IN":
            return _acceptor(operation, value)
        found = self._acceptors.get(id(value))
        if found is None:
            found = self._acceptors[id(value)] = _CharacterSet(value)
        return found

    def _repeat(self, least: int, most: int, items: Any, following: int, path: str) -> int:
        if items.getwidth()[1] == 0:
            return following
        end = following
        for _ in range(most - least):
            following = self._add(_Branch((self._sequence(items, following, path), end)), path)
        for _ in range(least):
            following = self._sequence(items, following, path)
        return following


def _parse(pattern: str, path: str) -> Any:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise _refused(path, f"at most {MAX_PATTERN_CHARS} characters, got {len(pattern)}")
    try:
        parsed = _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise _refused(path, f"is not a regular expression: {error}") from error
    if parsed.state.flags & ~re.UNICODE:
        raise _refused(path, "flags are not supported")
    return parsed


def _acceptor(operation: str, value: Any) -> Accepts:
    if operation == "ANY":
        return lambda character: character != "\n"
    if operation == "LITERAL":
        expected = chr(value)
        return lambda character: character == expected
    assert operation == "NOT_LITERAL"
    excluded = chr(value)
    return lambda character: character != excluded


def _refused(path: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {problem}", param=path)


class StopPatternMatcher:
    """Has the interface of `StopStringMatcher`."""

    __slots__ = ("_held", "_patterns", "_threads", "matched", "reported")

    def __init__(self, patterns: StopPatterns) -> None:
        self.matched: str | None = None
        """The text of the match."""
        self.reported: str | None = None
        """The pattern that has matched."""
        self._patterns = patterns
        self._held = ""
        self._threads: dict[int, int] = {}
        """The states that are being followed, with the number of characters since the earliest start of each."""

    @property
    def held(self) -> str:
        """Text at the end that may become a match."""
        return self._held

    def push(self, text: str) -> str:
        """Adds text, and releases what can no longer be part of a match. What follows a match in this text is gone."""
        assert self.matched is None
        return self._scan(text, ignore_matches=False)

    def push_ignoring_matches(self, text: str) -> str:
        """Adds text in which no match may end yet. One that begins here can end later."""
        return self._scan(text, ignore_matches=True)

    def flush(self) -> str:
        """Returns the held text at the end of an output without a match: it is ordinary text then."""
        text, self._held, self._threads = self._held, "", {}
        return text

    def _scan(self, text: str, *, ignore_matches: bool) -> str:
        pending = self._held + text
        for index, character in enumerate(text, start=len(self._held) + 1):
            found = self._read(character)
            if found is not None and not ignore_matches:
                length, self.reported = found
                self.matched = pending[index - length : index]
                self._held, self._threads = "", {}
                return pending[: index - length]
        num_held = max(self._threads.values(), default=0)
        num_released = len(pending) - num_held
        self._held = pending[num_released:]
        return pending[:num_released]

    def _read(self, character: str) -> tuple[int, str] | None:
        """Reads one character. Returns the length and the pattern of the longest match that ends with it."""
        states, threads = self._patterns.states, dict[int, int]()
        matches: list[tuple[int, str]] = []
        # The longest threads come first, so each state is entered once, by the thread that has begun first.
        current = sorted(self._threads.items(), key=lambda item: -item[1])
        seen = set[int]()
        for state_index, length in [*current, *((start, 0) for start in self._patterns.first)]:
            state = states[state_index]
            if not isinstance(state, _Character) or not state.accepts(character):
                continue
            for reached in self._patterns.closure(state.following, seen):
                target = states[reached]
                if isinstance(target, _Match):
                    matches.append((length + 1, target.pattern))
                else:
                    threads[reached] = length + 1
        self._threads = threads
        return max(matches, key=lambda match: match[0], default=None)
