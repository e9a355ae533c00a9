"""`/v1/messages` at a router: streams end without `[DONE]`, and errors in a stream have Anthropic's form."""

from starlette.types import Receive, Send

from onward.proto.engine import ErrorInfo
from onward.router.endpoints.generation import RouterGenerationEndpoint
from onward.router.partial_output import PartialOutputWriter
from onward.router.stream_routing_state import StreamRoutingState
from onward.web import asgi, sse
from onward.web.anthropic_api.error_format import message_error_body
from onward.web.auth.api_key_table import Caller
from onward.web.error_format import error_body


class RouterMessagesEndpoint(RouterGenerationEndpoint):
    async def stream_to_client(self, routing: StreamRoutingState, caller: Caller, receive: Receive, send: Send) -> None:
        writer = MessageEventWriter(send, routing.stream, self.runner, reports_resumes=self.config.report_resumes)
        await asgi.run_until_disconnect(receive, self.runner.run_stream(routing, writer))


class MessageEventWriter(PartialOutputWriter):
    end_marker = b""

    async def error_event(self, error: ErrorInfo, body: bytes | None) -> bytes:
        return sse.named_event("error", message_error_body(body or error_body(error), error.status))
