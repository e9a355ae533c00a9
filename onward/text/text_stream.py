"""The text of one output: tokens in, the text that may be shown out.

Detokenizing and stop strings in one place, fed token by token, so that what has been delivered up to a position is a
function of the tokens up to there. That is what makes a stream resumable: replay the tokens, drop what was delivered, go
on. Knows nothing of requests, and does not decide that an output ends but by a stop string.
"""

from collections.abc import Collection, Iterable, Sequence

from onward.proto.finish_reasons import INCOMPLETE_REASONS
from onward.text.detokenizer import Detokenizer
from onward.text.stop_matcher import new_stop_matcher
from onward.text.stop_patterns import StopPatterns
from onward.text.token_table import TokenTable

INTERRUPTED_REASONS = INCOMPLETE_REASONS | {"error"}
"""Finish reasons of an output that was interrupted: it may be continued elsewhere, so nothing held back is shown."""


class TextStream:
    """`end_token_ids` end the output, and their text is not shown. With `include_stop`, the string or token that ends
    the output is shown, unless it is a special token. A stop string that is complete before `min_tokens` tokens does
    not count."""

    num_tool_calls = 0
    """Plain text has no calls."""
    num_reasoning_tokens = None
    """Nor is thinking looked for in it."""

    __slots__ = (
        "_detokenizer",
        "_end_token_ids",
        "_include_stop",
        "_matcher",
        "_min_tokens",
        "num_tokens",
        "stopped",
    )

    def __init__(
        self,
        table: TokenTable,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        end_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        stop_patterns: StopPatterns | None = None,
    ) -> None:
        self.num_tokens = 0
        """Tokens pushed so far. Once stopped: the output's length, the stop string's last token included."""
        self.stopped = False
        """A stop string was completed by the newest token. Nothing may be pushed after that."""
        self._detokenizer = Detokenizer(table, skip_special_tokens)
        self._matcher = new_stop_matcher(stop, stop_patterns)
        self._include_stop = include_stop
        self._end_token_ids = frozenset(end_token_ids)
        self._min_tokens = min_tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string or pattern that ended the output."""
        return self._matcher.reported if self._matcher else None

    def push(self, token_id: int) -> str:
        """Adds a token, and returns the text that may be shown now. Sets `stopped` if the token completes a stop
        string."""
        assert not self.stopped
        self.num_tokens += 1
        if token_id in self._end_token_ids and not self._include_stop:
            return ""
        text = self._detokenizer.push(token_id)
        if self._matcher is None:
            return text
        if self.num_tokens < self._min_tokens:
            return self._matcher.push_ignoring_matches(text)
        text = self._matcher.push(text)
        if self._matcher.matched is not None:
            self.stopped = True
            if self._include_stop:
                text += self._matcher.matched
        return text

    def finish(self, reason: str) -> str:
        """Returns the rest of the text when the output has ended for this reason. There is none after a stop string. An
        interrupted output may continue elsewhere, so its held text is not returned."""
        if self.stopped or reason in INTERRUPTED_REASONS:
            return ""
        held = self._matcher.flush() if self._matcher else ""
        return held + self._detokenizer.flush()

    def num_emitted_tokens(self, token_ids: Sequence[int], num_hidden: int = 0) -> int:
        """Returns how many of the pushed tokens, from the first on, have all of their text among the text that was
        returned. A part of the next token's text may have been returned too.

        `token_ids` are all tokens that were pushed. `num_hidden` is a number of characters at the end of the returned
        text that do not count. The method replays the tokens, so it is only for the end of an output that was
        interrupted."""
        if self.stopped:
            return len(token_ids)
        detokenizer = self._detokenizer.fresh_copy()
        num_chars, boundaries = 0, [(0, 0)]
        for num_tokens, token_id in enumerate(token_ids, 1):
            if token_id not in self._end_token_ids or self._include_stop:
                num_chars += len(detokenizer.push(token_id))
            if not detokenizer.pending:
                boundaries.append((num_tokens, num_chars))
        num_held = len(self._matcher.held) if self._matcher else 0
        num_returned = num_chars - num_held - num_hidden
        return max(num_tokens for num_tokens, end in boundaries if end <= num_returned)

    def take_events(self) -> None:
        """Returns None, because plain text is not parsed into events. `ParsedTextStream` does that."""
        return

    @classmethod
    def replay(
        cls,
        token_ids: Iterable[int],
        table: TokenTable,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        end_token_ids: Collection[int] = (),
        min_tokens: int = 0,
    ) -> tuple["TextStream", str]:
        """Returns the stream as it is after these tokens, and all the text that it has returned by then. If a stop
        string ends the output among them, the stream is stopped there, and `num_tokens` is the output's length."""
        stream = cls(table, stop, include_stop, skip_special_tokens, end_token_ids, min_tokens)
        released: list[str] = []
        for token_id in token_ids:
            released.append(stream.push(token_id))
            if stream.stopped:
                break
        return stream, "".join(released)
