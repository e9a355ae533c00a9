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
    def __init__(self, serving: StreamRunner, found: ClusterResponseStore, max_body_bytes: int) -> None:
        self._serving = serving
        self._found = found
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        caller = get_caller(request.scope)
        given = await read_abort_names(request, self._max_body_bytes)
        if given is None:
            check_admin(caller)
            every = sorted(await self._abort(None, None))
            audit_log.log_abort(caller, None, every)
            return abort_response(every, [])
        names = {one: without_id_prefix(one) for one in given}
        known = await self._abort([*names.values()], caller.access_filter) if names else set[str]()
        aborted = [one for one, bare in names.items() if one in known or bare in known]
        audit_log.log_abort(caller, given, aborted)
        return abort_response(aborted, [one for one in names if one not in aborted])

    async def _abort(self, names: list[str] | None, caller: str | None) -> Set[str]:
        """A stored response that nothing runs is cancelled, also where no instance has it any more."""
        aborted = await self._serving.abort(names, caller)
        left = [one for one in aborted.left if is_stored(one.request.path, one.request.body)]
        records = [self._found.record_of(one, is_live=False) for one in left]
        idle = aborted.idle.keys() - {one.request_id for one in left}
        _, are_cancelled = await asyncio.gather(
            asyncio.gather(*(self._found.cancel_soon(one, CANCEL_S) for one in records)),
            asyncio.gather(*(self._found.cancel_idle(request_id, CANCEL_S) for request_id in idle)),
        )
        ended = [aborted.idle[one] for one, is_cancelled in zip(idle, are_cancelled, strict=True) if is_cancelled]
        return {*aborted.known_names}.union(*ended)
