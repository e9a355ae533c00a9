"""Which requests come from this machine, where there is no cluster key to prove anything with."""

import pytest
from starlette.types import Scope

from onward.api.endpoints.cluster_auth import ClusterAuth
from onward.clock import SystemClock
from onward.web.error_format import RequestFailed
from tests.web.exchange import request_scope

OURS = ClusterAuth("", SystemClock())


def scope_from(address: str, headers: dict[str, str] | None = None) -> Scope:
    return {**request_scope(headers=headers), "client": (address, 1)}


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_this_machine_may_ask(address: str) -> None:
    OURS.check(scope_from(address), b"")


@pytest.mark.parametrize("address", ["192.0.2.7", "::ffff:192.0.2.7", "fe80::1", "", "localhost"])
def test_another_machine_may_not(address: str) -> None:
    with pytest.raises(RequestFailed):
        OURS.check(scope_from(address), b"")


@pytest.mark.parametrize("name", ["Forwarded", "X-Forwarded-For", "X-Real-IP", "Via"])
@pytest.mark.parametrize("value", ["127.0.0.1", "192.0.2.7", ""])
def test_what_a_proxy_passes_on_does_not_come_from_this_machine(name: str, value: str) -> None:
    with pytest.raises(RequestFailed):
        OURS.check(scope_from("127.0.0.1", {name: value}), b"")
