"""The model's tokenizer and chat template, for routers that tokenize prompts themselves."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.api.endpoints.attempts import MSGPACK, read_cluster_message
from onward.api.endpoints.cluster_auth import ClusterAuth
from onward.api.lifecycle.request_builder import ApiServices
from onward.proto.router import QueryTokenizerFiles
from onward.text.prompt_tokenizer import read_tokenizer_files
from onward.web.auth.authenticator import CLUSTER


class TokenizerEndpoint:
    def __init__(self, backend: ApiServices, proven: ClusterAuth) -> None:
        self._backend = backend
        self._proven = proven
        self._decoder = msgspec.msgpack.Decoder(QueryTokenizerFiles)

    async def get_tokenizer_files(self, request: Request) -> Response:
        await read_cluster_message(request, self._proven, self._decoder)
        text = await self._backend.executors.text.run(CLUSTER.name, lambda: read_tokenizer_files(self._backend.model))
        return Response(msgspec.msgpack.encode(text), media_type=MSGPACK)
