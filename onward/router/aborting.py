"""`POST /v1/abort`: ends requests by name (see `web.aborts`), whichever instance has them, and so that no attempt brings
them back. Names that are unknown here are asked for at the instances. To a caller that is no admin the names of other
callers are unknown, and it may not end all requests.
"""

import asyncio
from collections.abc import Set

from starlette.requests import Request
from starlette.responses import Response

from onward.router.responses import FoundResponses
from onward.router.serving import Serving
from onward.web import audit
from onward.web.aborts import abort_answer, asked_names, bare_name
from onward.web.callers import caller_of, check_admin
from onward.web.response_sketch import is_stored

CANCEL_S = 3.0


class Aborting:
    def __init__(self, serving: Serving, found: FoundResponses, max_body_bytes: int) -> None:
        self._serving = serving
        self._found = found
        self._max_body_bytes = max_body_bytes

    async def abort(self, request: Request) -> Response:
        caller = caller_of(request.scope)
        given = await asked_names(request, self._max_body_bytes)
        if given is None:
            check_admin(caller)
            every = sorted(await self._abort(None, None))
            audit.note_abort(caller, None, every)
            return abort_answer(every, [])
        names = {one: bare_name(one) for one in given}
        known = await self._abort([*names.values()], caller.scope) if names else set[str]()
        aborted = [one for one, bare in names.items() if one in known or bare in known]
        audit.note_abort(caller, given, aborted)
        return abort_answer(aborted, [one for one in names if one not in aborted])

    async def _abort(self, names: list[str] | None, caller: str | None) -> Set[str]:
        """A stored response that nothing runs is cancelled, also where no instance has it any more."""
        aborted = await self._serving.abort(names, caller)
        left = [one for one in aborted.left if is_stored(one.origin.path, one.origin.body)]
        records = [self._found.record_of(one, is_live=False) for one in left]
        idle = aborted.idle.keys() - {one.request_id for one in left}
        _, are_cancelled = await asyncio.gather(
            asyncio.gather(*(self._found.cancel_soon(one, CANCEL_S) for one in records)),
            asyncio.gather(*(self._found.cancel_idle(request_id, CANCEL_S) for request_id in idle)),
        )
        ended = [aborted.idle[one] for one, is_cancelled in zip(idle, are_cancelled, strict=True) if is_cancelled]
        return {*aborted.known}.union(*ended)
