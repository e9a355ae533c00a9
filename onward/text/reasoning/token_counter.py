"""How many tokens of an output are told as thinking, once it is known what their text says.

A token is what its last character is; one that completes no character is what it becomes. So it is a function of the
tokens, like all that is told of them.
"""

from collections import deque
from collections.abc import Sequence

from onward.text.message_events import MessageEvent, ReasoningText


class ReasoningTokenCounter:
    __slots__ = ("_num_classified", "_num_read", "_num_textless", "_unclassified", "count")

    def __init__(self) -> None:
        self.count = 0
        self._num_read = self._num_classified = 0
        """Characters."""
        self._num_textless = 0
        """Tokens that have shown no text yet."""
        self._unclassified: deque[tuple[int, int]] = deque()
        """Where a text ends of which nobody knows what it says, and how many tokens it took."""

    def push(self, text: str) -> None:
        """What one more token has let be shown."""
        self._num_textless += 1
        self.flush(text)

    def flush(self, text: str) -> None:
        """More text, of tokens that have come before."""
        if text:
            self._num_read += len(text)
            self._unclassified.append((self._num_read, self._num_textless))
            self._num_textless = 0

    def count_events(self, events: Sequence[MessageEvent]) -> None:
        for event in events:
            self._num_classified += len(event.text)
            while self._unclassified and self._unclassified[0][0] <= self._num_classified:
                _, num_tokens = self._unclassified.popleft()
                if isinstance(event, ReasoningText):
                    self.count += num_tokens
