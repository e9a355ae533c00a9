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
    def __init__(self, services: ApiServices, cluster_auth: ClusterAuth) -> None:
        self._services = services
        self._cluster_auth = cluster_auth
        self._decoder = msgspec.msgpack.Decoder(QueryTokenizerFiles)

    async def get_tokenizer_files(self, request: Request) -> Response:
        await read_cluster_message(request, self._cluster_auth, self._decoder)
        files = await self._services.executors.text.run(
            CLUSTER.name, lambda: read_tokenizer_files(self._services.model)
        )
        return Response(msgspec.msgpack.encode(files), media_type=MSGPACK)
