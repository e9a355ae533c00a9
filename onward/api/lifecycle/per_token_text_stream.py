"""Text events token by token, for responses whose events must not depend on how the tokens are grouped into updates."""

from collections.abc import Sequence

from onward.api.lifecycle.choice_update import OutputTextStream
from onward.text.message_events import ContentText, EndEvents, MessageEvent, TokenEvents


class PerTokenTextStream:
    """Wraps another text stream. Its events are one `TokenEvents` for each token and an `EndEvents`, however the tokens are
    grouped into updates, so all that is derived from them depends on the tokens alone."""

    __slots__ = ("_steps", "_stream")

    def __init__(self, stream: OutputTextStream) -> None:
        self._stream = stream
        self._steps: list[MessageEvent] = []

    @property
    def stopped(self) -> bool:
        return self._stream.stopped

    @property
    def num_reasoning_tokens(self) -> int | None:
        return self._stream.num_reasoning_tokens

    @property
    def num_tool_calls(self) -> int:
        return self._stream.num_tool_calls

    @property
    def stop_string(self) -> str | None:
        return self._stream.stop_string

    def push(self, token_id: int) -> str:
        text = self._stream.push(token_id)
        self._steps.append(TokenEvents(self._message_events(text)))
        return text

    def finish(self, reason: str) -> str:
        text = self._stream.finish(reason)
        self._steps.append(EndEvents(self._message_events(text)))
        return text

    def num_emitted_tokens(self, token_ids: Sequence[int]) -> int:
        return self._stream.num_emitted_tokens(token_ids)

    def take_events(self) -> list[MessageEvent]:
        steps, self._steps = self._steps, []
        return steps

    def _message_events(self, text: str) -> tuple[MessageEvent, ...]:
        events = self._stream.take_events()
        if events is not None:
            return tuple(events)
        return (ContentText(text),) if text else ()
