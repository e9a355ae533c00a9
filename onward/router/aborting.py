"""`POST /v1/abort`: ends requests by name (see `web.aborts`), whichever instance has them, and so that no attempt brings
them back. Names that nobody knows here are asked for at the instances. Whoever is no admin finds those of others unknown,
and may not end all.
"""

from starlette.requests import Request
from starlette.responses import Response

from onward.router.serving import Serving
from onward.web import audit
from onward.web.aborts import abort_answer, asked_names, bare_name
from onward.web.callers import caller_of, check_admin


class Aborting:
    def __init__(self, serving: Serving, max_body_bytes: int) -> None:
        self._serving = serving
        self._max_body_bytes = max_body_bytes

    async def abort(self, request: Request) -> Response:
        caller = caller_of(request.scope)
        given = await asked_names(request, self._max_body_bytes)
        if given is None:
            check_admin(caller)
            every = sorted(await self._serving.abort(None))
            audit.note_abort(caller, None, every)
            return abort_answer(every, [])
        names = {one: bare_name(one) for one in given}
        known = await self._serving.abort([*names.values()], caller.scope) if names else set()
        aborted = [one for one, bare in names.items() if one in known or bare in known]
        audit.note_abort(caller, given, aborted)
        return abort_answer(aborted, [one for one in names if one not in aborted])
