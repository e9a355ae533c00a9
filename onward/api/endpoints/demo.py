"""`--demo`: buttons that kill a process of this instance, or all of it, to show that streams continue.

The routes exist only with `--demo`. They need an admin key and our own page, or the cluster signature of a router.
"""

from starlette.requests import Request
from starlette.responses import Response

from onward.api.endpoints.cluster_auth import ClusterAuth
from onward.api.supervisor_client import SupervisorClient
from onward.config import ApiConfig
from onward.proto.demo import KillTarget
from onward.web.auth import audit_log
from onward.web.auth.api_key_table import ANONYMOUS
from onward.web.auth.authenticator import CLUSTER, GuardedRoute, RouteAccess, get_caller
from onward.web.http_responses import json_response
from onward.web.ui.demo_guard import DEMO_PATHS, check_own_page

MAX_BODY_BYTES = 4096


class KillEndpoints:
    def __init__(self, config: ApiConfig, supervisor: SupervisorClient, cluster_auth: ClusterAuth) -> None:
        self._config, self._supervisor, self._cluster_auth = config, supervisor, cluster_auth

    def routes(self) -> list[GuardedRoute]:
        if not self._config.demo:
            return []
        targets: tuple[KillTarget, ...] = ("worker", "engine", "instance")
        return [self._route(target) for target in targets]

    def _route(self, target: KillTarget) -> GuardedRoute:
        async def kill(request: Request) -> Response:
            caller = get_caller(request.scope)
            if caller is ANONYMOUS:
                # Without API keys there is a cluster key: `check_demo` requires one of the two.
                await self._cluster_auth.authenticated_body(request, MAX_BODY_BYTES)
            elif caller is not CLUSTER:
                check_own_page(request.scope, self._config.host)
            audit_log.log_action(CLUSTER if caller is ANONYMOUS else caller, f"kill_{target}", 1)
            self._supervisor.request_kill(target)
            return json_response({"status": "killing", "target": target})

        return GuardedRoute(DEMO_PATHS[target], kill, methods=["POST"], access=RouteAccess.ADMIN)
