import pytest

from onward.config import ServeConfig
from onward.errors import StartupError
from onward.supervisor.registration_config import (
    RegistrationConfig,
    check_routers,
    resolve_registration,
    source_address_to,
)

HERE, THERE = "http://127.0.0.1:8080", "http://192.0.2.7:8080"


def test_an_instance_without_routers_registers_with_nobody() -> None:
    assert resolve_registration(ServeConfig(), 8000).router_urls == ()


def test_routers_keep_their_order_and_come_once() -> None:
    config = ServeConfig(router=f" {THERE}/ ,{HERE},, {THERE}")
    assert resolve_registration(config, 8000).router_urls == (THERE, HERE)


def test_the_url_has_the_port_that_was_opened() -> None:
    config = ServeConfig(router=HERE, port=0)
    assert resolve_registration(config, 4711) == RegistrationConfig((HERE,), "http://127.0.0.1:4711")
    assert resolve_registration(ServeConfig(router=HERE, host="::1"), 1).own_url == "http://[::1]:1"


def test_an_instance_that_listens_everywhere_is_called_by_the_address_on_the_way_to_the_router() -> None:
    config = ServeConfig(router=f"{HERE},{THERE}", host="0.0.0.0")
    assert resolve_registration(config, 1).own_url == f"http://{source_address_to('192.0.2.7')}:1"


@pytest.mark.parametrize(("host", "own_url"), [("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1")])
def test_an_instance_that_listens_everywhere_is_called_by_its_loopback_address_where_all_routers_are(
    host: str, own_url: str
) -> None:
    config = ServeConfig(router=f"{HERE},http://localhost:1", host=host)
    assert resolve_registration(config, 1).own_url == own_url


def test_a_url_that_was_named_is_meant() -> None:
    config = ServeConfig(router=THERE, host="0.0.0.0", advertise_url="https://gpu7:443/")
    assert resolve_registration(config, 1).own_url == "https://gpu7:443"


@pytest.mark.parametrize("url", ["http://2001:db8::7:8000", "http://[2001:db8::7]:8000/"])
def test_an_ipv6_address_may_be_advertised_without_brackets(url: str) -> None:
    """As a pod template writes it: http://$(POD_IP):8000."""
    config = ServeConfig(router=THERE, host="::", advertise_url=url, cluster_key_file="key")
    check_routers(config)
    assert resolve_registration(config, 1).own_url == "http://[2001:db8::7]:8000"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (ServeConfig(router="127.0.0.1:8080"), "--router.*'127.0.0.1:8080'"),
        (ServeConfig(router=f"{HERE},tcp://127.0.0.1:1"), "--router.*'tcp://127.0.0.1:1'"),
        (ServeConfig(router="http://127.0.0.1"), "--router"),
        (ServeConfig(router="http://127.0.0.1:0"), "--router"),
        (ServeConfig(router="http://127.0.0.1:x"), "--router"),
        (ServeConfig(router="http://127.0.0.1:99999"), "--router.*0-65535"),
        (ServeConfig(router="http://gpu-box..internal:1"), "--router.*label"),
        (ServeConfig(router="http://[::1"), "--router.*IPv6"),
        (ServeConfig(router="http://127.0.0.1:80/v1"), "--router"),
        (ServeConfig(router="http://a:b@127.0.0.1:80"), "--router"),
        (ServeConfig(router=THERE), f"{THERE}.*--cluster-key-file"),
        (ServeConfig(router=f"{HERE},{THERE}", host="0.0.0.0"), f"{THERE}.*--cluster-key-file"),
        (ServeConfig(router=THERE, cluster_key_file="k"), "--host 127.0.0.1.*--advertise-url"),
        (ServeConfig(router=",".join(f"{HERE}{i}" for i in range(17))), "16 routers"),
        (ServeConfig(router=HERE, advertise_url="gpu7"), "--advertise-url"),
        (ServeConfig(router=HERE, advertise_url="http://0.0.0.0:8000"), "--advertise-url"),
        (ServeConfig(detach_ttl_s=-1), "--detach-ttl-s"),
        (ServeConfig(detach_ttl_s=float("nan")), "--detach-ttl-s"),
        (ServeConfig(response_ttl_s=float("inf")), "--response-ttl-s"),
    ],
)
def test_what_cannot_work_is_named(config: ServeConfig, named: str) -> None:
    with pytest.raises(StartupError, match=named):
        check_routers(config)


@pytest.mark.parametrize(
    "config",
    [
        ServeConfig(),
        ServeConfig(router=HERE, port=0),
        ServeConfig(router="http://localhost:1,http://[::1]:1"),
        ServeConfig(router=THERE, host="0.0.0.0", cluster_key_file="k"),
        ServeConfig(router=THERE, cluster_key_file="k", advertise_url="http://tunnel:80"),
        ServeConfig(detach_ttl_s=0),
    ],
)
def test_what_can_work_is_let_through(config: ServeConfig) -> None:
    check_routers(config)
