"""`/v1/responses/input_tokens`: the number of tokens of a response's prompt. Nothing is generated."""

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.api.endpoints.question_runner import QuestionRunner
from onward.api.lifecycle.request_builder import ApiServices, validation_context
from onward.api.requests.decoding import check_model
from onward.api.requests.schemas import ValidationContext
from onward.api.requests.validation import check_messages
from onward.api.responses.chat_request import with_response_field_names
from onward.api.responses.create_request import check_fields
from onward.api.responses.response_store import InstanceResponseStore
from onward.errors import ClientError
from onward.text.prompt_tokenizer import ChatMessage
from onward.web.json_body import decode, decode_fields
from onward.web.openai_api.response_endpoint import with_previous_response
from onward.web.openai_api.response_prompt import ResponsePromptFields, prompt_messages, prompt_template_fields
from onward.web.openai_api.template_fields import ChatTemplateFields, template_options


class CountInputTokensRequest(ResponsePromptFields, frozen=True, kw_only=True):
    """A request to count the tokens of a prompt. All other fields of a request for a response have no effect."""

    model: str | None = None
    previous_response_id: str | None = None


_requests = msgspec.json.Decoder(CountInputTokensRequest)


def decode_input(body: bytes, context: ValidationContext) -> tuple[list[ChatMessage], ChatTemplateFields]:
    """Returns the messages and the template fields of the prompt whose tokens are to be counted."""
    check_fields(decode_fields(body), body)
    request = decode(body, _requests)
    if request.model is not None:
        check_model(request.model, context)
    messages, template_fields = prompt_messages(request), prompt_template_fields(request)
    check_messages(messages)
    template_options(template_fields)  # checks the tools
    return messages, template_fields


class CountInputTokensEndpoint:
    def __init__(self, services: ApiServices, runner: QuestionRunner, response_store: InstanceResponseStore) -> None:
        self._services = services
        self._runner = runner
        self._validation_context = validation_context(services)
        self._with_previous = partial(with_previous_response, response_store)

    async def count(self, request: Request) -> Response:
        return await self._runner.run(request, self._count, with_previous=self._with_previous)

    async def count_for_router(self, request: Request) -> Response:
        return await self._runner.run(request, self._count, is_routed=True)

    def _count(self, body: bytes) -> dict[str, Any]:
        created_s = int(self._services.clock.wall_s())
        try:
            messages, fields = decode_input(body, self._validation_context)
            token_ids = self._services.text_processor.tokenize_messages(
                messages, template_options(fields), None, created_s
            )
        except ClientError as error:
            raise with_response_field_names(error) from error
        return {"object": "response.input_tokens", "input_tokens": len(token_ids)}
