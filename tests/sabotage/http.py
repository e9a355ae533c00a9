"""Deliberate bugs in HTTP: connections, and which requests are believed."""

from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from onward.api import app as api_app
from onward.api.endpoints import cluster_auth
from onward.cli import flag_checks
from onward.proto.engine import ErrorInfo
from onward.router import app as router_app
from onward.transport import cluster_signature
from onward.web import asgi
from onward.web.auth import allowed_hosts, cross_site
from onward.web.auth.allowed_hosts import AllowedHosts
from onward.web.auth.authenticator import Authenticator
from onward.web.auth.cross_site import CrossSiteGuard
from onward.web.auth.host_and_origin import Authority
from onward.web.server import half_closed, http_protocol
from onward.web.server.http_protocol import LimitedHttpProtocol
from tests.sabotage.patches import Patches, Sabotage

CONNECTIONS = "tests/web/test_connections.py::"
PAGES = "tests/api/test_web_pages.py::"
CROSS_SITE = "tests/web/test_cross_site.py::"
CALLERS = "tests/web/test_authenticator.py::"


def _a_signature_is_for_any_method(patch: Patches) -> None:
    original = cluster_signature._mac
    patch.put(cluster_signature, "_mac", lambda key, stamp, method, path, body: original(key, stamp, "ANY", path, body))


def _the_idle_time_goes_on_during_a_request(patch: Patches) -> None:
    def on_message_begin(original: Callable, self: LimitedHttpProtocol) -> None:
        armed, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        original(self)
        self.timeout_keep_alive_task = armed

    patch.around(LimitedHttpProtocol, "on_message_begin", on_message_begin)


def _a_head_has_no_time_that_begins_in_the_middle_of_a_read(patch: Patches) -> None:
    def on_message_begin(original: Callable, self: LimitedHttpProtocol) -> None:
        has_time = self._read_timer is not None
        original(self)
        if not has_time:
            self._set_timer(None)

    patch.around(LimitedHttpProtocol, "on_message_begin", on_message_begin)


def _every_client_knows_chunks(patch: Patches) -> None:
    patch.put(LimitedHttpProtocol, "_start_asgi_task", HttpToolsProtocol._start_asgi_task)


def _a_client_that_sends_no_more_has_gone(patch: Patches) -> None:
    patch.put(LimitedHttpProtocol, "eof_received", lambda self: False)


def _nobody_looks_whether_a_half_closed_client_has_gone(patch: Patches) -> None:
    patch.put(half_closed, "_is_reset", lambda transport: False)


def _routers_may_still_read(patch: Patches) -> None:
    patch.put(http_protocol, "INTERNAL_PREFIX", "/none/")


def _slashes_are_redirected(patch: Patches) -> None:
    def routed(original: Callable, *args: object) -> Starlette:
        app = original(*args)
        app.router.redirect_slashes = True
        return app

    for module in (api_app, router_app):
        patch.around(module, "make_starlette_app", routed)


def _proxies_say_who_asks(patch: Patches) -> None:
    def config(original: Callable, *args: object, **options: object) -> uvicorn.Config:
        return original(*args, **{**options, "proxy_headers": True})

    patch.around(uvicorn, "Config", config)


def _a_proxy_on_this_machine_is_this_machine(patch: Patches) -> None:
    patch.put(cluster_auth, "_OF_PROXIES", frozenset())


def _pages_of_any_origin_are_served(patch: Patches) -> None:
    patch.put(CrossSiteGuard, "_is_allowed", lambda self, origin: True)


def _only_an_origin_gives_a_page_away(patch: Patches) -> None:
    patch.put(cross_site, "_OTHER_SITES", ())


def _any_host_is_ours(patch: Patches) -> None:
    patch.put(AllowedHosts, "allows", lambda self, authority: True)


def _a_host_is_what_stands_before_a_colon(patch: Patches) -> None:
    patch.put(allowed_hosts, "parse_authority", lambda text: Authority(text.lower().partition(":")[0], None))


def _a_page_of_any_scheme_is_ours(patch: Patches) -> None:
    patch.put(cross_site, "is_same_origin", lambda origin, host: origin.partition("://")[2] == host)


def _allowed_names_are_compared_as_written(patch: Patches) -> None:
    patch.put(allowed_hosts, "normalized_host", str.lower)


def _origins_are_taken_as_written(patch: Patches) -> None:
    patch.put(flag_checks, "canonical_origin", lambda origin: origin)


def _any_body_is_json(patch: Patches) -> None:
    for module in (api_app, router_app):
        patch.put(module, "check_content_type", lambda scope: None)


def _pages_are_looked_at_although_there_are_keys(patch: Patches) -> None:
    def refusal(original: Callable, self: Authenticator, scope: Scope) -> ErrorInfo | None:
        refused = original(self, scope)
        return refused or (self._cross_site_guard.refusal(scope) if self._cross_site_guard is not None else None)

    patch.around(Authenticator, "check", refusal)


def _any_signature_will_do(patch: Patches) -> None:
    def refusal(original: Callable, self: Authenticator, scope: Scope) -> ErrorInfo | None:
        return None if asgi.header(scope, b"x-onward-proof") else original(self, scope)

    patch.around(Authenticator, "_refusal_without_keys", refusal)


TABLE = [
    Sabotage(
        "pages-of-any-origin",
        "pages of other sites are served by a server without keys",
        _pages_of_any_origin_are_served,
        [CROSS_SITE + "test_pages_of_other_origins_are_refused"],
    ),
    Sabotage(
        "pages-without-origin",
        "a page whose browser tells no origin is served",
        _only_an_origin_gives_a_page_away,
        [CROSS_SITE + "test_a_page_whose_browser_tells_no_origin_is_refused_by_its_site"],
    ),
    Sabotage(
        "any-host",
        "a page that gives its name the server's address reads responses",
        _any_host_is_ours,
        [CROSS_SITE + "test_a_page_that_has_given_its_name_our_address_is_refused"],
    ),
    Sabotage(
        "host-not-parsed",
        "what is no host name counts as one of the server's",
        _a_host_is_what_stands_before_a_colon,
        [CROSS_SITE + "test_a_host_that_is_no_host_name_is_not_ours"],
    ),
    Sabotage(
        "any-scheme-is-ours",
        "a page of another scheme passes for one of the server's own",
        _a_page_of_any_scheme_is_ours,
        [CROSS_SITE + "test_a_page_of_another_scheme_is_not_our_own"],
    ),
    Sabotage(
        "allowed-host-never-matches",
        "an address that the operator allows is refused, since browsers write it in another way",
        _allowed_names_are_compared_as_written,
        [CROSS_SITE + "test_an_address_is_allowed_however_it_is_written"],
    ),
    Sabotage(
        "cors-origin-never-matches",
        "an origin is taken in a spelling that no browser sends",
        _origins_are_taken_as_written,
        ["tests/cli/test_flags.py::test_an_origin_that_no_browser_sends_is_refused_with_the_one_that_they_do"],
    ),
    Sabotage(
        "any-media-type",
        "a form is taken for JSON",
        _any_body_is_json,
        [PAGES + "test_a_form_is_refused_and_a_body_without_a_type_is_taken"],
    ),
    Sabotage(
        "keys-do-not-help",
        "a server with keys cannot be used behind a proxy",
        _pages_are_looked_at_although_there_are_keys,
        [CALLERS + "test_pages_are_refused_where_there_are_no_keys_and_nobody_else_is_anywhere"],
    ),
    Sabotage(
        "any-signature-opens",
        "a header that looks like a cluster signature lets a page in",
        _any_signature_will_do,
        [CALLERS + "test_a_router_that_proves_itself_may_call_a_server_without_keys_by_any_name"],
    ),
    Sabotage(
        "slashes-redirected",
        "a path with a slash too many is redirected to the host that the client has named",
        _slashes_are_redirected,
        [
            "tests/api/test_roles.py::test_no_path_is_redirected_to_the_host_that_a_client_names",
            "tests/router/test_app.py::test_no_path_is_redirected_to_the_host_that_a_client_names",
        ],
    ),
    Sabotage(
        "headers-say-who-asks",
        "a header says from where a request comes",
        _proxies_say_who_asks,
        ["tests/web/test_server.py::test_who_a_client_is_says_its_connection_and_no_header"],
    ),
    Sabotage(
        "proxies-are-local",
        "what a proxy on this machine passes on is taken for this machine's own",
        _a_proxy_on_this_machine_is_this_machine,
        ["tests/api/test_cluster_auth.py::test_what_a_proxy_passes_on_does_not_come_from_this_machine"],
    ),
    Sabotage(
        "idle-time-goes-on",
        "a request that begins in the read in which another ended is cut off when the idle time is over",
        _the_idle_time_goes_on_during_a_request,
        [CONNECTIONS + "test_a_request_in_the_same_read_as_the_end_of_a_body_is_not_ended_for_the_idle_time"],
    ),
    Sabotage(
        "head-without-time",
        "a head that begins in the read in which another request ended may take for ever",
        _a_head_has_no_time_that_begins_in_the_middle_of_a_read,
        [CONNECTIONS + "test_a_head_that_begins_in_the_same_read_as_the_end_of_a_body_has_a_time_too"],
    ),
    Sabotage(
        "chunks-for-all",
        "a client of HTTP/1.0 gets a body in chunks",
        _every_client_knows_chunks,
        [CONNECTIONS + "test_a_client_of_http_1_0_gets_a_body_that_ends_with_the_connection[/parts-one two]"],
    ),
    Sabotage(
        "half-closed-is-gone",
        "a client that closes its sending side gets no response",
        _a_client_that_sends_no_more_has_gone,
        [
            CONNECTIONS + f"test_a_client_that_closes_its_sending_side_gets_its_response[{case}]"
            for case in ("/slow-at last-1.1", "/slow-at last-1.0")
        ],
    ),
    Sabotage(
        "gone-is-half-closed",
        "the work for a client that has gone goes on",
        _nobody_looks_whether_a_half_closed_client_has_gone,
        [CONNECTIONS + "test_a_client_that_has_gone_is_noticed_although_it_could_still_be_reading[/slow]"],
    ),
    Sabotage(
        "routers-half-close",
        "an attempt that its router has given up goes on",
        _routers_may_still_read,
        [CONNECTIONS + "test_a_router_that_closes_its_connection_has_given_the_attempt_up"],
    ),
    Sabotage(
        "signature-of-any-method",
        "a cluster signature that was made for a GET is good for a DELETE",
        _a_signature_is_for_any_method,
        [
            "tests/transport/test_cluster_signature.py::test_a_proof_is_for_one_method_one_path_one_body_and_a_minute",
            CALLERS + "test_a_proof_of_the_clusters_key_is_as_good_as_an_admins",
        ],
    ),
]
