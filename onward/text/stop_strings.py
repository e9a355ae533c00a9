"""Finds the first stop string in a text that arrives in pieces.

A text is read character by character, and the first character that completes any stop string ends it; if it completes
several, the longest counts. So the result depends on the text alone, not on how it was cut into pieces. Text that may yet
become a stop string is held back, and nothing else is.

The machine is Aho and Corasick's: a state is the longest end of the text that begins some stop string.

    stop strings "ab", "abc", "bd"       root ─a─> a ─b─> ab ─c─> abc      (fallback of ab: b)
                                            └─b─> b ─d─> bd
"""

from collections.abc import Sequence

from onward.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024

_ROOT = 0


def check_stop_strings(stop: Sequence[str]) -> None:
    """Refuses what no matcher is built for, naming the request's field."""
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed", param="stop")
    for string in stop:
        if not string:
            raise InvalidRequest("stop holds an empty string", param="stop")
        if len(string) > MAX_STOP_CHARS:
            raise InvalidRequest(f"stop holds a string of over {MAX_STOP_CHARS} characters", param="stop")


class StopStringMatcher:
    __slots__ = (
        "_children",
        "_depths",
        "_fallbacks",
        "_first_characters",
        "_held",
        "_match_lengths",
        "_state",
        "matched",
    )

    def __init__(self, stop: Sequence[str]) -> None:
        check_stop_strings(stop)
        self.matched: str | None = None
        """The stop string that was found."""
        self._state = _ROOT
        self._held = ""
        self._first_characters = frozenset(string[0] for string in stop)
        self._children: list[dict[str, int]] = [{}]
        self._depths = [0]
        self._fallbacks = [_ROOT]
        self._match_lengths = [0]
        for string in stop:
            self._add(string)
        self._link()

    @property
    def reported(self) -> str | None:
        """The request's stop string that was found."""
        return self.matched

    @property
    def held(self) -> str:
        """Text at the end that may become a stop string."""
        return self._held

    def push(self, text: str) -> str:
        """Adds text, and releases what can no longer be part of a stop string. After a match nothing more may be added;
        what follows the match in this text is gone."""
        assert self.matched is None
        if self._state == _ROOT and self._first_characters.isdisjoint(text):
            return text
        return self._scan(text, ignore_matches=False)

    def push_ignoring_matches(self, text: str) -> str:
        """Adds text in which no stop string may end yet. One that begins here can end later."""
        return self._scan(text, ignore_matches=True)

    def flush(self) -> str:
        """Returns the held text at the end of an output without a match: it is ordinary text then."""
        text, self._held, self._state = self._held, "", _ROOT
        return text

    def _scan(self, text: str, ignore_matches: bool) -> str:
        pending = self._held + text
        state = self._state
        for index, character in enumerate(text, start=len(self._held) + 1):
            state = self._next(state, character)
            length = self._match_lengths[state]
            if length and not ignore_matches:
                self.matched = pending[index - length : index]
                self._held, self._state = "", _ROOT
                return pending[: index - length]
        # A state without children is a whole stop string that was passed over; only a shorter end can still grow.
        while state != _ROOT and not self._children[state]:
            state = self._fallbacks[state]
        self._state = state
        num_released = len(pending) - self._depths[state]
        self._held = pending[num_released:]
        return pending[:num_released]

    def _next(self, state: int, character: str) -> int:
        while (child := self._children[state].get(character)) is None:
            if state == _ROOT:
                return _ROOT
            state = self._fallbacks[state]
        return child

    def _add(self, string: str) -> None:
        state = _ROOT
        for character in string:
            child = self._children[state].get(character)
            if child is None:
                child = self._children[state][character] = len(self._children)
                self._children.append({})
                self._depths.append(self._depths[state] + 1)
                self._fallbacks.append(_ROOT)
                self._match_lengths.append(0)
            state = child
        self._match_lengths[state] = len(string)

    def _link(self) -> None:
        """Fallbacks, breadth first, since each is found through those of shallower states."""
        queue = list(self._children[_ROOT].values())
        for state in queue:  # grows while it is walked; every state enters once
            for character, child in self._children[state].items():
                queue.append(child)
                self._fallbacks[child] = self._next(self._fallbacks[state], character)
                if not self._match_lengths[child]:
                    self._match_lengths[child] = self._match_lengths[self._fallbacks[child]]
