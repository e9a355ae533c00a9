"""`/v1/messages`: Anthropic's messages in, content blocks out. All later code handles it as a chat."""

from collections.abc import Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from onward.api.endpoints.chat import ChatAdapter
from onward.api.lifecycle.choice_update import OutputTextStream
from onward.api.lifecycle.per_token_text_stream import PerTokenTextStream
from onward.api.messages.chat_request import MessageChatRequest, decode_message, with_message_field_names
from onward.api.messages.message_formatters import MessageJsonWriter
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.schemas import ChatCompletionRequest, ValidationContext
from onward.errors import ClientError
from onward.proto.reasoning_params import ReasoningParams
from onward.proto.sampling_params import SamplingParams
from onward.web.anthropic_api.message_paths import ID_PREFIX


class MessagesAdapter(ChatAdapter):
    id_prefix = ID_PREFIX

    def decode(self, body: bytes, context: ValidationContext) -> tuple[MessageChatRequest, tuple[str, ...]]:
        return decode_message(body, context)

    def prompt_path(self, request: ChatCompletionRequest, index: int) -> str:
        return "messages"

    def reasoning_params(
        self, request: ChatCompletionRequest, prompts: list[list[int]], *, has_grammar: bool
    ) -> ReasoningParams | None:
        if self._text_processor.message_parsers.reasoning is None:
            # Clients send a budget whatever the model is. A model that does not think never exceeds it.
            request = replace(request, thinking_budget=None)
        return super().reasoning_params(request, prompts, has_grammar=has_grammar)

    def new_text_stream(self, prepared: PreparedRequest, sampling: SamplingParams) -> OutputTextStream:
        return PerTokenTextStream(super().new_text_stream(prepared, sampling))

    def json_writer(self, prepared: PreparedRequest) -> MessageJsonWriter:
        return MessageJsonWriter(self._text_processor, prepared)

    @contextmanager
    def client_field_names(self) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            raise with_message_field_names(error) from error
