"""`POST /v1/abort`: aborts requests by name (see `web.openai_api.abort_request`), whichever api process serves them.

An aborted request returns its output so far, and each unfinished choice ends with `abort`; a response is `cancelled`. The
record of a detached stream is dropped, and that of a stored response is cancelled. An abort may be repeated; the names are
then unknown. For a caller that is not an admin, names of other callers are unknown too, and it may not abort all requests.
A router names the caller on whose behalf it aborts.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.api.endpoints.cluster_auth import ClusterAuth
from onward.api.engine_link.engine_client import EngineClient
from onward.api.lifecycle.stream_registry import AbortOutcome, StreamRegistry
from onward.proto.router import InstanceAbortReply
from onward.web.auth import audit_log
from onward.web.auth.authenticator import check_admin, get_caller
from onward.web.openai_api.abort_request import abort_response, decode_routed_abort, read_abort_names, without_id_prefix


class AbortEndpoints:
    def __init__(
        self, client: EngineClient, streams: StreamRegistry, max_body_bytes: int, cluster_auth: ClusterAuth
    ) -> None:
        self._client = client
        self._streams = streams
        self._max_body_bytes = max_body_bytes
        self._cluster_auth = cluster_auth

    async def abort(self, request: Request) -> Response:
        caller = get_caller(request.scope)
        ids = await read_abort_names(request, self._max_body_bytes)
        if ids is None:
            check_admin(caller)
        outcome = await self._abort(ids, caller.access_filter)
        aborted, unknown = _split_known_names(ids, outcome.names)
        audit_log.log_abort(caller, ids, aborted)
        return abort_response(aborted, unknown)

    async def abort_for_router(self, request: Request) -> Response:
        """Aborts requests for a router, which has authenticated the caller and written the audit log. A response that no
        process runs here is left unchanged: another instance may have more of it, and only the router can query them
        all."""
        ids, caller = decode_routed_abort(await self._cluster_auth.authenticated_body(request, self._max_body_bytes))
        outcome = await self._abort(ids, caller, leaves_idle=True)
        aborted, _ = _split_known_names(ids, outcome.names)
        reply = InstanceAbortReply(aborted, outcome.idle)
        return Response(msgspec.json.encode(reply), media_type="application/json")

    async def _abort(self, ids: list[str] | None, caller: str | None, *, leaves_idle: bool = False) -> AbortOutcome:
        """Aborts requests of this caller; None: of all callers. Running requests are aborted before stored records are
        dropped: a stream that is detached meanwhile has stored its record by then."""
        abort_all = ids is None
        names = list({name for requested_id in ids or () for name in (requested_id, without_id_prefix(requested_id))})
        if not names and not abort_all:
            return AbortOutcome(set(), {})
        running = set[str]()
        try:
            running = await self._client.abort_by_name(names, abort_all=abort_all, caller=caller)
        finally:
            stored = await self._streams.abort_kept(names, abort_all, caller, leaves_idle=leaves_idle)
        return AbortOutcome(running | stored.names, stored.idle)


def _split_known_names(ids: list[str] | None, aborted_names: set[str]) -> tuple[list[str], list[str]]:
    """Splits the requested names into known and unknown ones."""
    if ids is None:
        return sorted(aborted_names), []
    ids = list(dict.fromkeys(ids))
    aborted = [
        requested_id
        for requested_id in ids
        if not aborted_names.isdisjoint((requested_id, without_id_prefix(requested_id)))
    ]
    return aborted, [requested_id for requested_id in ids if requested_id not in aborted]
