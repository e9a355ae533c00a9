"""The routes of files and batches, for instances and routers. Without `--batch-dir` they name the flag."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from onward.batches.batch_endpoints import BatchEndpoints
from onward.batches.batch_files import MAX_LINE_BYTES
from onward.batches.batch_policy import BatchLimits
from onward.batches.batch_service import BatchService
from onward.batches.batch_store import BatchStore
from onward.batches.caller_turns import CallerTurns
from onward.batches.file_endpoints import FileEndpoints
from onward.clock import Clock
from onward.config import ApiConfig, RouterConfig
from onward.errors import NotFound
from onward.random_source import RandomSource
from onward.web.auth.authenticator import ActiveKeys, GuardedRoute, RouteAccess
from onward.web.auth.cross_site import FILES_PATH

BATCHES_PATH = "/v1/batches"
FILE_PATH = FILES_PATH + "/{file_id}"
CONTENT_PATH = FILE_PATH + "/content"
BATCH_PATH = BATCHES_PATH + "/{batch_id}"
CANCEL_PATH = BATCH_PATH + "/cancel"
MAX_LINE_OVERHEAD_BYTES = 64 << 10
"""Bytes of a line beside the request's body."""
MODEL_GRACE_S = 120.0
"""Instances of different models register at different times. A model that has answered is waited for longer."""
METHODS = {
    FILES_PATH: ["GET", "POST"],
    FILE_PATH: ["GET", "DELETE"],
    CONTENT_PATH: ["GET"],
    BATCHES_PATH: ["GET", "POST"],
    BATCH_PATH: ["GET"],
    CANCEL_PATH: ["POST"],
}
Handler = Callable[[Request], Awaitable[Response]]


def make_service(config: ApiConfig | RouterConfig, active_keys: ActiveKeys, clock: Clock) -> BatchService | None:
    """Returns what runs batches, after preparing the batch folder. None if this server has no such folder or is a
    prefill instance."""
    if config.batch_dir is None or (isinstance(config, ApiConfig) and config.role == "prefill"):
        return None
    limits = BatchLimits(config.batch_max_bytes, config.batch_concurrency, config.batch_ttl_s)
    store = BatchStore(config.batch_dir)
    store.prepare()
    model_grace_s = MODEL_GRACE_S if isinstance(config, RouterConfig) else 0.0
    max_line_bytes = min(MAX_LINE_BYTES, config.max_body_bytes + MAX_LINE_OVERHEAD_BYTES)
    return BatchService(store, limits, active_keys, clock, model_grace_s, max_line_bytes)


def batch_routes(service: BatchService | None, random: RandomSource) -> list[GuardedRoute]:
    handlers: dict[str, Handler] = dict.fromkeys(METHODS, _refuse)
    if service is not None:
        turns = CallerTurns()
        files = FileEndpoints(service.store, service.limits, service.clock, turns)
        batches = BatchEndpoints(service.store, service.limits, service.clock, random, turns)
        handlers = {
            FILES_PATH: files.files,
            FILE_PATH: files.file,
            CONTENT_PATH: files.content,
            BATCHES_PATH: batches.batches,
            BATCH_PATH: batches.batch,
            CANCEL_PATH: batches.cancel,
        }
    return [
        GuardedRoute(path, handler, methods=METHODS[path], access=RouteAccess.USER)
        for path, handler in handlers.items()
    ]


async def _refuse(_: Request) -> Response:
    problem = "this server keeps no files and batches: it was started without --batch-dir DIR"
    raise NotFound(problem, code="batches_disabled")
