"""The model's tokenizer and chat template, for routers that tokenize prompts themselves."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.api.attempts import MSGPACK, proven_message
from onward.api.jobs import Backend
from onward.api.proven import Proven
from onward.proto.router import AskText
from onward.text.prompt_tokens import read_text
from onward.web.callers import CLUSTER


class TellingText:
    def __init__(self, backend: Backend, proven: Proven) -> None:
        self._backend = backend
        self._proven = proven
        self._decoder = msgspec.msgpack.Decoder(AskText)

    async def tell(self, request: Request) -> Response:
        await proven_message(request, self._proven, self._decoder)
        text = await self._backend.queues.texts.run(CLUSTER.name, lambda: read_text(self._backend.model))
        return Response(msgspec.msgpack.encode(text), media_type=MSGPACK)
