"""A text that is told token by token, however its tokens have come: so what is made of it is a function of the tokens."""

from collections.abc import Sequence

from onward.api.lifecycle.choice_update import OutputTextStream
from onward.text.message_events import ContentText, EndEvents, MessageEvent, TokenEvents


class PerTokenTextStream:
    """Around any other. Its events are one `TokenEvents` for each token and an `EndEvents`."""

    __slots__ = ("_steps", "_text")

    def __init__(self, text: OutputTextStream) -> None:
        self._text = text
        self._steps: list[MessageEvent] = []

    @property
    def stopped(self) -> bool:
        return self._text.stopped

    @property
    def num_reasoning_tokens(self) -> int | None:
        return self._text.num_reasoning_tokens

    @property
    def num_tool_calls(self) -> int:
        return self._text.num_tool_calls

    def push(self, token_id: int) -> str:
        said = self._text.push(token_id)
        self._steps.append(TokenEvents(self._told(said)))
        return said

    def finish(self, reason: str) -> str:
        said = self._text.finish(reason)
        self._steps.append(EndEvents(self._told(said)))
        return said

    def num_emitted_tokens(self, token_ids: Sequence[int]) -> int:
        return self._text.num_emitted_tokens(token_ids)

    def take_events(self) -> list[MessageEvent]:
        steps, self._steps = self._steps, []
        return steps

    def _told(self, said: str) -> tuple[MessageEvent, ...]:
        events = self._text.take_events()
        if events is not None:
            return tuple(events)
        return (ContentText(said),) if said else ()
