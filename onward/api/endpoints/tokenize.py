"""`/tokenize` and `/detokenize`: the token ids of a text or a chat, and the text of token ids. Nothing is generated.

The JSON has vLLM's form. A token's text is its bytes read as UTF-8 by themselves, as in logprobs. Routers use separate
paths, authenticated by the cluster key.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.api.endpoints.question_runner import QuestionRunner
from onward.api.lifecycle.request_builder import ApiServices, validation_context
from onward.api.requests.decoding import check_model
from onward.api.requests.preprocessing_executors import DeferredRender
from onward.api.requests.validation import check_chat_template, check_messages, check_token_ids
from onward.text.prompt_tokenizer import ChatMessage
from onward.web.body_parts import check_parts
from onward.web.json_body import decode, field_error
from onward.web.openai_api.template_fields import ChatTemplateFields, template_options


class TokenizeRequest(ChatTemplateFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Whether to add the special tokens that begin a text. Default: true for a prompt, and false for a chat, whose template
    writes its own."""
    messages: list[ChatMessage] | None = None
    chat_template: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


class TokenizeEndpoints:
    def __init__(self, services: ApiServices, runner: QuestionRunner) -> None:
        self._services = services
        self._runner = runner
        self._validation_context = validation_context(services)

    async def tokenize(self, request: Request) -> Response:
        return await self._runner.run(request, self._handle_tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._runner.run(request, self._handle_detokenize)

    async def tokenize_for_router(self, request: Request) -> Response:
        return await self._runner.run(request, self._handle_tokenize, is_routed=True)

    async def detokenize_for_router(self, request: Request) -> Response:
        return await self._runner.run(request, self._handle_detokenize, is_routed=True)

    def _handle_tokenize(self, body: bytes) -> dict[str, Any] | DeferredRender[dict[str, Any]]:
        check_parts(body)
        request = decode(body, _tokenize)
        self._check_model(request.model)
        return (
            self._tokenize_body(request)
            if request.chat_template is None
            else DeferredRender(lambda: self._tokenize_body(request))
        )

    def _tokenize_body(self, request: TokenizeRequest) -> dict[str, Any]:
        token_ids = self._tokenize_chat(request) if request.messages is not None else self._tokenize_prompt(request)
        token_strings = self._services.text_processor.token_strings
        return {
            "count": len(token_ids),
            "max_model_len": self._max_model_len(),
            "tokens": token_ids,
            "token_strs": [token_strings.text(token_id) for token_id in token_ids]
            if request.return_token_strs
            else None,
        }

    def _tokenize_prompt(self, request: TokenizeRequest) -> list[int]:
        if request.prompt is None:
            raise field_error("prompt", "is required, or messages")
        return self._services.text_processor.tokenize_text(
            request.prompt, "prompt", add_special_tokens=request.add_special_tokens is not False
        )

    def _tokenize_chat(self, request: TokenizeRequest) -> list[int]:
        messages = request.messages or []
        if request.prompt is not None:
            raise field_error("messages", "stand instead of prompt, so only one of the two can be given")
        check_messages(messages)
        check_chat_template(request, self._validation_context)
        now_s = int(self._services.clock.wall_s())
        return self._services.text_processor.tokenize_messages(
            messages,
            template_options(request),
            request.chat_template,
            now_s,
            add_special_tokens=bool(request.add_special_tokens),
        )

    def _handle_detokenize(self, body: bytes) -> dict[str, Any]:
        request = decode(body, _detokenize)
        self._check_model(request.model)
        check_token_ids("tokens", request.tokens, self._validation_context)
        return {"prompt": self._services.text_processor.decode(request.tokens, with_special=True)}

    def _check_model(self, model: str | None) -> None:
        if model is not None:
            check_model(model, self._validation_context)

    def _max_model_len(self) -> int:
        worker = self._services.engine_client.worker
        return self._services.model.config.max_position_embeddings if worker is None else worker.max_model_len
