"""`GET /tokenizer_info?model=…` at a router: asks an instance of the model."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.proto.router import TOKENIZER_INFO_PATH
from onward.router.endpoints.forward import RouterForwardEndpoint
from onward.web.auth.authenticator import get_caller

PATH = "/tokenizer_info"


class RouterTokenizerInfoEndpoint(RouterForwardEndpoint):
    async def show(self, request: Request) -> Response:
        body = msgspec.json.encode({"model": request.query_params.get("model")})
        return await self.forward(get_caller(request.scope), TOKENIZER_INFO_PATH, body)
