"""`POST /v1/abort`: ends requests by name (see `web.openai_api.abort_request`), whichever instance has them, and so that no
attempt brings them back. Names that are unknown here are asked for at the instances. To a caller that is no admin the names
of other callers are unknown, and it may not end all requests.
"""

import asyncio
from collections.abc import Set

from starlette.requests import Request
from starlette.responses import Response

from onward.router.response_store import ClusterResponseStore
from onward.router.stream_runner import StreamRunner
from onward.web.auth import audit_log
from onward.web.auth.authenticator import check_admin, get_caller
from onward.web.openai_api.abort_request import abort_response, read_abort_names, without_id_prefix
from onward.web.openai_api.response_options import is_stored

CANCEL_S = 3.0


class RouterAbortEndpoint:
    def __init__(self, runner: StreamRunner, response_store: ClusterResponseStore, max_body_bytes: int) -> None:
        self._runner = runner
        self._response_store = response_store
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        caller = get_caller(request.scope)
        requested = await read_abort_names(request, self._max_body_bytes)
        if requested is None:
            check_admin(caller)
            aborted_names = sorted(await self._abort(None, None))
            audit_log.log_abort(caller, None, aborted_names)
            return abort_response(aborted_names, [])
        names = {name: without_id_prefix(name) for name in requested}
        known = await self._abort([*names.values()], caller.access_filter) if names else set[str]()
        aborted = [name for name, bare_name in names.items() if name in known or bare_name in known]
        audit_log.log_abort(caller, requested, aborted)
        return abort_response(aborted, [name for name in names if name not in aborted])

    async def _abort(self, names: list[str] | None, caller: str | None) -> Set[str]:
        """Aborts requests at this router and at all instances, and returns the names that were known. Stored responses
        that nothing runs are cancelled, even if no instance has them any more. None stands for all names, or for any
        caller."""
        aborted = await self._runner.abort(names, caller)
        stored = [stream for stream in aborted.left if is_stored(stream.request.path, stream.request.body)]
        records = [self._response_store.record_of(stream, is_live=False) for stream in stored]
        idle = aborted.idle.keys() - {stream.request_id for stream in stored}
        _, are_cancelled = await asyncio.gather(
            asyncio.gather(*(self._response_store.cancel_soon(record, CANCEL_S) for record in records)),
            asyncio.gather(*(self._response_store.cancel_idle(request_id, CANCEL_S) for request_id in idle)),
        )
        ended = [
            aborted.idle[request_id]
            for request_id, is_cancelled in zip(idle, are_cancelled, strict=True)
            if is_cancelled
        ]
        return {*aborted.known_names}.union(*ended)
