"""Turns exceptions of endpoints into error responses in OpenAI's form, for plain ASGI endpoints and Starlette's
routes."""

import logging
from collections.abc import Coroutine
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope, Send

from onward import log
from onward.errors import InternalError, OnwardError
from onward.proto.engine import ErrorInfo
from onward.proto.error_info import to_error_info
from onward.web import asgi
from onward.web.access_log import access_record
from onward.web.error_format import RequestFailed, error_body, error_headers

INTERNAL_ERROR = to_error_info(InternalError("internal error"))
"""The response to a fault of the server. It is not retryable, because the next attempt would meet the same fault."""

_HINTS = {
    "/v1/conversations": "; conversations are not stored here: continue a stored response by previous_response_id",
}
"""What to use in place of routes that this server leaves out, by the beginning of their paths."""

_logger = logging.getLogger(__name__)


async def handle_errors(scope: Scope, send: Send, coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs the coroutine that answers a request. An exception becomes an error response."""
    try:
        await coroutine
    except asgi.ClientDisconnected:
        return
    except OnwardError as error:
        await asgi.respond_error(send, to_error_info(error))
    except RequestFailed as failure:
        await asgi.respond_error(send, failure.info, error_body(failure.info, failure.partial))
    except Exception:
        _logger.exception(_fault_event(scope))
        await asgi.respond_error(send, INTERNAL_ERROR)


def _fault_event(scope: Scope) -> log.LogEvent:
    record = access_record(scope)
    return log.event(
        "a request failed because of an internal error", **log.request_fields(record.request_id, record.label)
    )


async def _on_onward_error(_: Request, error: OnwardError) -> Response:
    return _response(to_error_info(error))


async def _on_failed_request(_: Request, failure: RequestFailed) -> Response:
    return _response(failure.info)


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    """Answers Starlette's own errors: no such route, or not this method."""
    path = request.scope["path"][:200]
    if error.status_code == 405:
        message, code = f"{request.method} is not allowed on {path}", "method_not_allowed"
    else:
        hint = next((hint for prefix, hint in _HINTS.items() if path.startswith(prefix)), "")
        message, code = f"there is nothing at {path}{hint}", "not_found"
    response = _response(ErrorInfo(code, message, error.status_code))
    response.headers.update(error.headers or {})
    return response


async def _on_fault(request: Request, _: Exception) -> Response:
    _logger.error(_fault_event(request.scope))
    return _response(INTERNAL_ERROR)


def _response(info: ErrorInfo) -> Response:
    return Response(error_body(info), info.status, headers=error_headers(info), media_type="application/json")


EXCEPTION_HANDLERS: Any = {
    OnwardError: _on_onward_error,
    RequestFailed: _on_failed_request,
    HTTPException: _on_http_exception,
    Exception: _on_fault,
}
"""For `Starlette(exception_handlers=...)`, which logs the faults by itself."""
