"""`--demo` at an instance: buttons for admins at our own page, and for routers that prove themselves; else nothing."""

import time

import httpx
import pytest

from onward.config import ApiConfig
from onward.proto.model import PreparedModel
from onward.proto.router import SIGNATURE_HEADER
from onward.transport.cluster_signature import sign_request
from onward.web.ui.demo_guard import DEMO_PATHS
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES
from tests.api.test_roles import keyed, until
from tests.web import route_access

CLUSTER_KEY = "11" * 32


def press(instance: Instance, target: str, name: str | None = None, **headers: str) -> httpx.Response:
    sent = route_access.header(name) | headers
    return httpx.post(instance.url + DEMO_PATHS[target], headers=sent, timeout=30, verify=NO_CERTIFICATES)


def test_an_admin_at_our_own_page_kills_and_every_other_does_not(model: PreparedModel) -> None:
    with keyed(model, demo=True) as instance:
        own = {"Origin": instance.url}
        assert press(instance, "worker", None, **own).status_code == 401
        assert press(instance, "worker", "user", **own).status_code == 403
        for headers, param in (
            ({}, "Origin"),
            ({"Origin": "https://attacker.example"}, "Origin"),
            ({"Origin": "null"}, "Origin"),
            ({"Origin": "http://attacker.example:8000", "Host": "attacker.example:8000"}, "Host"),
        ):
            refused = press(instance, "worker", "admin", **headers)
            assert (refused.status_code, refused.json()["error"]["param"]) == (403, param)
        assert instance.kills == []
        for target in DEMO_PATHS:
            assert press(instance, target, "admin", **own).json() == {"status": "killing", "target": target}
        until(lambda: instance.kills == list(DEMO_PATHS))
        get = httpx.get(instance.url + DEMO_PATHS["worker"], headers=route_access.header("admin") | own)
        assert get.status_code == 405, "a link kills nothing"


def test_a_router_proves_itself_where_there_are_no_keys_and_no_other_client_kills(model: PreparedModel) -> None:
    with running(model, ApiConfig(demo=True, cluster_key=CLUSTER_KEY)) as instance:
        assert press(instance, "engine", Origin=instance.url).status_code == 403
        assert instance.kills == []
        proof = sign_request(CLUSTER_KEY, "POST", DEMO_PATHS["engine"], b"", time.time())
        assert press(instance, "engine", **{SIGNATURE_HEADER: proof}).status_code == 200
        until(lambda: instance.kills == ["engine"])


@pytest.mark.parametrize("target", DEMO_PATHS)
def test_without_demo_there_are_no_buttons(instance: Instance, target: str) -> None:
    assert press(instance, target, Origin=instance.url).status_code == 404
    assert httpx.get(instance.url + "/ui/session").json()["demo"] is False
