"""Finds the first stop string or match of a stop pattern in a text that arrives in pieces."""

from collections.abc import Sequence
from typing import Protocol

from onward.text.stop_patterns import StopPatternMatcher, StopPatterns
from onward.text.stop_strings import StopStringMatcher


class StopMatcher(Protocol):
    @property
    def matched(self) -> str | None:
        """The text that ended the output."""
        ...

    @property
    def reported(self) -> str | None:
        """The request's stop string or pattern that ended the output."""
        ...

    @property
    def held(self) -> str:
        """Text at the end that is not released yet, because it may become a match."""
        ...

    def push(self, text: str) -> str: ...
    def push_ignoring_matches(self, text: str) -> str: ...
    def flush(self) -> str: ...


def new_stop_matcher(strings: Sequence[str], patterns: StopPatterns | None) -> StopMatcher | None:
    """Returns a matcher, or None if nothing but a token ends the output."""
    if patterns is None:
        return StopStringMatcher(strings) if strings else None
    matcher = StopPatternMatcher(patterns)
    return _EitherMatcher(StopStringMatcher(strings), matcher) if strings else matcher


class _EitherMatcher:
    """Reads the text by two matchers, character by character. The first match counts; of two that end together, the
    longer one."""

    __slots__ = ("_held", "_matchers", "matched", "reported")

    def __init__(self, *matchers: StopMatcher) -> None:
        self.matched: str | None = None
        self.reported: str | None = None
        self._matchers = matchers
        self._held = ""

    @property
    def held(self) -> str:
        return self._held

    def push(self, text: str) -> str:
        assert self.matched is None
        pending, start = self._held + text, len(self._held)
        for index, character in enumerate(text, start=start + 1):
            for matcher in self._matchers:
                matcher.push(character)
            found = [matcher for matcher in self._matchers if matcher.matched is not None]
            if found:
                best = max(found, key=lambda matcher: len(matcher.matched or ""))
                self.matched, self.reported, self._held = best.matched, best.reported, ""
                return pending[: index - len(best.matched or "")]
        return self._release(pending)

    def push_ignoring_matches(self, text: str) -> str:
        for matcher in self._matchers:
            matcher.push_ignoring_matches(text)
        return self._release(self._held + text)

    def flush(self) -> str:
        for matcher in self._matchers:
            matcher.flush()
        text, self._held = self._held, ""
        return text

    def _release(self, pending: str) -> str:
        num_released = len(pending) - max(len(matcher.held) for matcher in self._matchers)
        self._held = pending[num_released:]
        return pending[:num_released]
