"""`/v1/responses`: items in, items out. A chat to all that is behind it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from onward.api.endpoints.chat import ChatAdapter
from onward.api.lifecycle.choice_update import OutputTextStream
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.schemas import ChatCompletionRequest, ValidationContext
from onward.api.responses.chat_request import ResponseChatRequest, decode_response, with_response_field_names
from onward.api.responses.response_formatters import ResponseJsonWriter
from onward.errors import ClientError
from onward.proto.sampling_params import SamplingParams
from onward.text.message_events import ContentText, EndEvents, MessageEvent, TokenEvents
from onward.web.openai_api.response_ids import PREFIX


class PerTokenTextStream:
    """Around any other. Its events are one `TokenEvents` for each token and an `EndEvents`, however the tokens have come:
    what is made of them is a function of the tokens."""

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


class ResponsesAdapter(ChatAdapter):
    id_prefix = PREFIX

    def decode(self, body: bytes, context: ValidationContext) -> tuple[ResponseChatRequest, tuple[str, ...]]:
        return decode_response(body, context), ()

    def prompt_path(self, request: ChatCompletionRequest, index: int) -> str:
        return "input"

    def new_text_stream(self, prepared: PreparedRequest, sampling: SamplingParams) -> OutputTextStream:
        return PerTokenTextStream(super().new_text_stream(prepared, sampling))

    def json_writer(self, prepared: PreparedRequest) -> ResponseJsonWriter:
        return ResponseJsonWriter(self._text_processor, prepared)

    @contextmanager
    def client_field_names(self) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            raise with_response_field_names(error) from error
