"""`/v1/messages/count_tokens`: the number of tokens of a message's prompt. Nothing is generated."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from onward.api.endpoints.question_runner import QuestionRunner
from onward.api.lifecycle.request_builder import ApiServices, validation_context
from onward.api.messages.chat_request import decode_count
from onward.api.requests.unsupported_fields import reject_unknown_fields
from onward.web.openai_api.template_fields import template_options


class CountTokensEndpoint:
    def __init__(self, services: ApiServices, runner: QuestionRunner) -> None:
        self._services = services
        self._runner = runner
        self._validation_context = validation_context(services)

    async def count(self, request: Request) -> Response:
        return await self._runner.run(request, self._count)

    async def count_for_router(self, request: Request) -> Response:
        return await self._runner.run(request, self._count, is_routed=True)

    def _count(self, body: bytes) -> dict[str, Any]:
        messages, fields, unknown = decode_count(body, self._validation_context)
        if self._services.config.strict_fields:
            reject_unknown_fields(unknown)
        created_s = int(self._services.clock.wall_s())
        token_ids = self._services.text_processor.tokenize_messages(messages, template_options(fields), None, created_s)
        return {"input_tokens": len(token_ids)}
