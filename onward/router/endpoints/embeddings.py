"""The paths that embed texts, at a router. Any instance can answer, and what one has lost the next is
asked for from the beginning.

Vectors and scores are functions of their texts alone, so there is no stream to resume, and nothing is stored.
"""

import msgspec
from starlette.types import Receive, Scope, Send

from onward.errors import DeadlineExceeded
from onward.proto import SCHEMA_VERSION
from onward.proto.router import EMBED_PATH, IGNORED_FIELDS_HEADER, Attempt
from onward.router.client_request import deadline_from_body, model_of_body
from onward.router.instance_registry import InstanceInfo, InstanceState
from onward.router.routing_policy import RoutingCriteria, can_take_request
from onward.router.stream_runner import StreamRunner, no_instance_of
from onward.router.upstream_client import ForwardedResponse
from onward.router.upstream_errors import parse_error_info
from onward.web import asgi
from onward.web.access_log import access_record
from onward.web.auth.authenticator import get_caller
from onward.web.error_handlers import handle_errors
from onward.web.openai_api.model_names import with_model
from onward.web.request_id_middleware import client_request_id

PATHS = ("/v1/embeddings", "/pooling", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score")
MAX_TRIES = 3
TIMEOUT_S = 600.0
"""Timeout of one attempt. A slow machine may need this long for the largest permitted request."""
DEADLINE_MARGIN_S = 1.0
"""An instance ends what is over its deadline by itself, and says so."""
_RETRYABLE_STATUSES = (429, 500, 502, 503)


class RouterEmbeddingsEndpoint:
    """An ASGI application."""

    def __init__(self, runner: StreamRunner, path: str, max_body_bytes: int) -> None:
        self._runner, self._path, self._max_body_bytes = runner, path, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await handle_errors(scope, send, self._serve(scope, receive, send))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await asgi.read_body(receive, self._max_body_bytes)
        runner = self._runner
        deadline_at_s = deadline_from_body(body, runner.clock.now_s(), runner.core.config.request_timeout_s)
        await asgi.run_until_disconnect(receive, self._answer(self._attempt(scope, body), deadline_at_s, send))

    def _attempt(self, scope: Scope, body: bytes) -> Attempt:
        caller, runner = get_caller(scope), self._runner
        access, request_id = access_record(scope), runner.random.hex_token()
        access.begin_trace(request_id, is_attempt=True)
        access.describe_request(self._path, body)
        return Attempt(
            schema_version=SCHEMA_VERSION,
            path=self._path,
            body=body,
            request_id=request_id,
            attempt_epoch=1,
            seed=0,
            created_s=int(runner.clock.wall_s()),
            client_request_id=client_request_id(scope),
            caller=caller.name,
            caller_limits=caller.limits,
            caller_priority=caller.priority,
            strict_fields=runner.core.config.strict_fields,
            trace=access.trace_context,
        )

    async def _answer(self, attempt: Attempt, deadline_at_s: float | None, send: Send) -> None:
        response: ForwardedResponse | None = None
        runner = self._runner
        name = model_of_body(attempt.body)
        model = await runner.choose_model(name, attempt.request_id, deadline_at_s)
        if name not in ("", model):
            attempt = msgspec.structs.replace(attempt, body=with_model(attempt.body, model))
        for instance in self._candidates(model):
            left_s = self._time_left_s(deadline_at_s)
            timeout_s = TIMEOUT_S if left_s is None else min(TIMEOUT_S, left_s + DEADLINE_MARGIN_S)
            message = msgspec.msgpack.encode(msgspec.structs.replace(attempt, deadline_in_s=left_s))
            reply = await runner.upstream.forward(instance.url, EMBED_PATH, message, timeout_s)
            response = reply or response
            if reply is not None and reply.status not in _RETRYABLE_STATUSES:
                break
        if response is None:
            self._time_left_s(deadline_at_s)
            raise no_instance_of(model)
        if response.status == 200:
            ignored = {} if response.ignored_fields is None else {IGNORED_FIELDS_HEADER: response.ignored_fields}
            await asgi.respond(send, 200, response.body, {**asgi.JSON_HEADERS, **ignored})
        else:
            await asgi.respond_error(send, parse_error_info(response.body, response.status), response.body)

    def _time_left_s(self, deadline_at_s: float | None) -> float | None:
        """Raises if that is nothing."""
        left_s = None if deadline_at_s is None else deadline_at_s - self._runner.clock.now_s()
        if left_s is not None and left_s <= 0:
            raise DeadlineExceeded("the request's deadline has passed")
        return left_s

    def _candidates(self, model: str) -> list[InstanceInfo]:
        """Returns the instances to try, in order. Ready instances come first, from a random one on, so that each gets
        its share. Others come last: an instance that restarts a process takes requests, but holds them."""
        runner = self._runner
        instances = [
            instance
            for instance in runner.core.serving_instances(runner.clock.now_s(), model)
            if can_take_request(instance, RoutingCriteria())
        ]
        ready = [instance for instance in instances if instance.state is InstanceState.READY]
        others = [instance for instance in instances if instance.state is not InstanceState.READY]
        first = runner.random.below(len(ready)) if ready else 0
        return (ready[first:] + ready[:first] + others)[:MAX_TRIES]
