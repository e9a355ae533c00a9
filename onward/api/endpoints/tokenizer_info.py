"""`/tokenizer_info`: the special tokens and the chat template of the model, by the field names of `tokenizer_config.json`.

Off unless `--tokenizer-info` is given, because a chat template may be private. Routers use a separate path, authenticated
by the cluster key.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from onward.api.endpoints.question_runner import QuestionRunner
from onward.api.lifecycle.request_builder import ApiServices
from onward.errors import NotFound


class TokenizerInfoEndpoint:
    def __init__(self, services: ApiServices, runner: QuestionRunner) -> None:
        self._services = services
        self._runner = runner

    async def show(self, request: Request) -> Response:
        return await self._runner.run(request, self._info)

    async def show_for_router(self, request: Request) -> Response:
        return await self._runner.run(request, self._info, is_routed=True)

    def _info(self, _: bytes) -> dict[str, Any]:
        services = self._services
        if not services.config.tokenizer_info:
            raise NotFound("the tokenizer is not shown here; the operator can allow it by --tokenizer-info")
        model, worker = services.model, services.engine_client.worker
        return {
            "model": model.name,
            "vocab_size": model.config.vocab_size,
            "model_max_length": model.config.max_position_embeddings if worker is None else worker.max_model_len,
            "bos_token": model.bos_token,
            "eos_token": model.eos_token,
            "pad_token": None,
            "chat_template": model.chat_template or None,
        }
