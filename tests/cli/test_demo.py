"""`--demo` is refused at the start unless the server is for this machine alone and has the key of an admin."""

from pathlib import Path
from typing import Any

import pytest

from onward.cli.api_keys import check_demo
from onward.cli.main import run
from onward.config import RouterConfig, ServeConfig
from onward.errors import StartupError
from onward.web.auth.api_key_table import ApiKeyTable
from tests.web.route_access import entries

ALL = ApiKeyTable(entries())
USERS = ApiKeyTable([entry for entry in entries() if entry.role == "user"])
CONFIGS = pytest.mark.parametrize("kind", [ServeConfig, RouterConfig])


@CONFIGS
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"host": "0.0.0.0"}, "--host 0.0.0.0"),
        ({"host": "::"}, "--host ::"),
        ({"host": "server.example"}, "--host server.example"),
        ({"allowed_host": ("server.example",)}, "--allowed-host"),
        ({"cors_origin": ("https://example.org",)}, "--cors-origin"),
    ],
)
def test_any_other_host_is_refused_and_named(kind: Any, flags: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        check_demo(kind(demo=True, **flags), ALL)
    check_demo(kind(**flags), ALL)


def test_an_instance_that_is_called_from_elsewhere_is_refused() -> None:
    with pytest.raises(StartupError, match="--advertise-url"):
        check_demo(ServeConfig(demo=True, advertise_url="http://10.0.0.7:8000"), ALL)
    check_demo(ServeConfig(demo=True, advertise_url="http://127.0.0.1:8000"), ALL)


@CONFIGS
def test_a_key_of_an_admin_is_needed(kind: Any) -> None:
    for keys in (ApiKeyTable(), USERS):
        with pytest.raises(StartupError, match="key of an admin"):
            check_demo(kind(demo=True), keys)
    check_demo(kind(demo=True), ALL)


def test_an_instance_behind_a_router_may_have_the_cluster_s_key_instead() -> None:
    check_demo(ServeConfig(demo=True, cluster_key_file="f"), ApiKeyTable())
    with pytest.raises(StartupError, match="key of an admin"):
        check_demo(RouterConfig(demo=True, cluster_key_file="f"), ApiKeyTable())


@pytest.mark.parametrize("command", ["serve", "router", "up"])
def test_each_command_refuses_it_before_anything_starts(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("ONWARD_API_KEY", raising=False)
    assert run([command, "--demo", "--port", "0"]) == 1
    assert "--demo needs the key of an admin" in capsys.readouterr().err
