"""`/v1/responses`: items in, items out. All later code handles it as a chat."""

from collections.abc import Iterator
from contextlib import contextmanager

from onward.api.endpoints.chat import ChatAdapter
from onward.api.lifecycle.choice_update import OutputTextStream
from onward.api.lifecycle.per_token_text_stream import PerTokenTextStream
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.schemas import ChatCompletionRequest, ValidationContext
from onward.api.responses.chat_request import ResponseChatRequest, decode_response, with_response_field_names
from onward.api.responses.response_formatters import ResponseJsonWriter
from onward.errors import ClientError
from onward.proto.sampling_params import SamplingParams
from onward.web.openai_api.response_ids import PREFIX


class ResponsesAdapter(ChatAdapter):
    id_prefix = PREFIX

    def decode(self, body: bytes, context: ValidationContext) -> tuple[ResponseChatRequest, tuple[str, ...]]:
        return decode_response(body, context)

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
