"""A text that is told token by token, however its tokens have come: so what is made of it is a function of the tokens."""

from collections.abc import Sequence

from onward.api.pieces import Text
from onward.text.message_events import Content, EndTold, Event, TokenTold


class StepText:
    """Around any other. Its events are one `TokenTold` for each token and an `EndTold`."""

    __slots__ = ("_steps", "_text")

    def __init__(self, text: Text) -> None:
        self._text = text
        self._steps: list[Event] = []

    @property
    def stopped(self) -> bool:
        return self._text.stopped

    @property
    def num_reasoning_tokens(self) -> int | None:
        return self._text.num_reasoning_tokens

    @property
    def num_calls(self) -> int:
        return self._text.num_calls

    def push(self, token_id: int) -> str:
        said = self._text.push(token_id)
        self._steps.append(TokenTold(self._told(said)))
        return said

    def finish(self, reason: str) -> str:
        said = self._text.finish(reason)
        self._steps.append(EndTold(self._told(said)))
        return said

    def num_covered(self, token_ids: Sequence[int]) -> int:
        return self._text.num_covered(token_ids)

    def take_events(self) -> list[Event]:
        steps, self._steps = self._steps, []
        return steps

    def _told(self, said: str) -> tuple[Event, ...]:
        events = self._text.take_events()
        if events is not None:
            return tuple(events)
        return (Content(said),) if said else ()
