import pytest

from onward.config import ServeConfig
from onward.errors import StartupError
from onward.supervisor.pd_config import PdConfig, check_pd, handoff_port_to_open, kv_host, pd_warnings, resolve_pd
from onward.supervisor.registration_config import advertised_host, source_address_to

KEY = "ab" * 32
HERE, THERE = "tcp://127.0.0.1:7000", "tcp://192.0.2.7:7000"


def test_a_mixed_instance_by_itself_has_nothing_to_do_with_others() -> None:
    plan = resolve_pd(ServeConfig(), "", None)
    assert plan == PdConfig()
    assert not plan.is_enabled


@pytest.mark.parametrize(
    "config",
    [
        ServeConfig(role="decode"),
        ServeConfig(role="decode", prefill_peers=HERE),
        ServeConfig(role="mixed", prefill_peers=HERE),
    ],
)
def test_an_instance_that_may_get_kv_from_others_says_how(config: ServeConfig) -> None:
    plan = resolve_pd(config, "", None)
    assert plan.is_enabled
    assert (plan.kv_backend, plan.kv_host, plan.kv_checksums) == ("shm", "127.0.0.1", False)


def test_a_prefill_instance_listens_and_receives_no_kv() -> None:
    config = ServeConfig(role="prefill")
    assert handoff_port_to_open(config) == 0
    plan = resolve_pd(config, "", 7000)
    assert plan.is_enabled
    assert (plan.handoff_address, plan.kv_backend) == (HERE, None)


def test_a_mixed_instance_listens_only_where_it_is_told_to() -> None:
    assert handoff_port_to_open(ServeConfig()) is None
    assert handoff_port_to_open(ServeConfig(handoff_port=7000)) == 7000
    assert resolve_pd(ServeConfig(handoff_port=7000), "", 7000).is_enabled


@pytest.mark.parametrize(
    ("peers", "key", "wanted", "backend", "checksums"),
    [
        (f"{HERE}, ipc://@p", "", "auto", "shm", False),
        (f"{HERE},{THERE}", KEY, "auto", "tcp", True),
        ("", KEY, "auto", "tcp", True),  # peers that come later may be anywhere
        (HERE, "", "tcp", "tcp", True),
        (THERE, KEY, "nixl", "nixl", False),
    ],
)
def test_auto_takes_shared_memory_only_where_all_peers_are_local(
    peers: str, key: str, wanted: str, backend: str, checksums: bool
) -> None:
    plan = resolve_pd(ServeConfig(role="decode", prefill_peers=peers, kv_backend=wanted), key, None)  # type: ignore[arg-type]
    assert (plan.kv_backend, plan.kv_checksums) == (backend, checksums)


def test_checksums_are_what_was_said_if_it_was_said() -> None:
    config = ServeConfig(role="decode", prefill_peers=HERE, kv_checksums="on")
    assert resolve_pd(config, "", None).kv_checksums
    config = ServeConfig(role="decode", prefill_peers=THERE, kv_checksums="off")
    assert not resolve_pd(config, KEY, None).kv_checksums


def test_peers_keep_their_order_and_come_once() -> None:
    config = ServeConfig(role="decode", prefill_peers=f" {THERE} ,{HERE},, {THERE}")
    assert resolve_pd(config, KEY, None).prefill_peers == (THERE, HERE)


def test_kv_is_taken_in_where_peers_can_reach_it() -> None:
    outward = source_address_to("192.0.2.7")
    assert kv_host("0.0.0.0", (HERE,), "") == "127.0.0.1", "without a key nobody outside is let in"
    assert kv_host("192.0.2.1", (THERE,), KEY) == "192.0.2.1", "a host that was named is meant"
    assert kv_host("127.0.0.1", (HERE,), KEY) == "127.0.0.1"
    assert kv_host("127.0.0.1", (HERE, THERE), KEY) == outward
    assert kv_host("0.0.0.0", (THERE,), KEY) == outward
    assert kv_host("127.0.0.1", (), KEY, ("192.0.2.7",)) == outward, "the router will name peers over there"
    assert kv_host("127.0.0.1", (), KEY, ("127.0.0.1",)) == "127.0.0.1"
    assert advertised_host("0.0.0.0") not in ("0.0.0.0", "")


@pytest.mark.parametrize(
    ("router", "host", "peers", "key", "backend"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1", "", "", "shm"),
        ("http://127.0.0.1:8080", "127.0.0.1", "", KEY, "shm"),
        ("http://127.0.0.1:8080", "0.0.0.0", "", KEY, "tcp"),  # peers may be on other machines, as clients may
        ("http://127.0.0.1:8080,http://192.0.2.7:8080", "0.0.0.0", "", KEY, "tcp"),
        ("http://192.0.2.7:8080", "0.0.0.0", HERE, KEY, "tcp"),
        ("http://127.0.0.1:8080", "127.0.0.1", THERE, KEY, "tcp"),
    ],
)
def test_a_decode_instance_with_a_router_needs_no_peers_to_say_how_kv_comes_to_it(
    router: str, host: str, peers: str, key: str, backend: str
) -> None:
    config = ServeConfig(
        role="decode", host=host, router=router, prefill_peers=peers, cluster_key_file="k" if key else None
    )
    check_pd(config)
    plan = resolve_pd(config, key, None)
    assert plan.is_enabled
    assert plan.kv_backend == backend


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (ServeConfig(role="prefill", prefill_peers=HERE), "--prefill-peers"),
        (ServeConfig(role="decode", local_prefill=False), "--no-local-prefill"),
        (ServeConfig(role="decode", prefill_peers=f"{HERE},http://127.0.0.1:7000"), "'http://127.0.0.1:7000'"),
        (ServeConfig(role="decode", prefill_peers="tcp://127.0.0.1"), "'tcp://127.0.0.1'"),
        (ServeConfig(role="decode", prefill_peers="tcp://127.0.0.1:0"), "'tcp://127.0.0.1:0'"),
        (ServeConfig(role="decode", prefill_peers="tcp://127.0.0.1:x"), "'tcp://127.0.0.1:x'"),
        (ServeConfig(role="decode", prefill_peers="127.0.0.1:7000"), "'127.0.0.1:7000'"),
        (ServeConfig(role="decode", prefill_peers="ipc://"), "'ipc://'"),
        (ServeConfig(role="decode", prefill_peers=THERE), f"{THERE}.*--cluster-key-file"),
        (ServeConfig(role="prefill", host="0.0.0.0"), "--host 0.0.0.0.*--cluster-key-file"),
        (ServeConfig(handoff_port=7000, host="192.0.2.1"), "--host 192.0.2.1.*--cluster-key-file"),
        (ServeConfig(handoff_port=70000), "--handoff-port 70000"),
        (ServeConfig(lease_s=0), "--lease-s"),
        (ServeConfig(offer_hold_s=-1), "--offer-hold-s"),
        (ServeConfig(handoff_timeout_s=float("inf")), "--handoff-timeout-s"),
        (ServeConfig(local_prefill_tokens=-1), "--local-prefill-tokens"),
    ],
)
def test_what_cannot_work_is_named(config: ServeConfig, named: str) -> None:
    with pytest.raises(StartupError, match=named):
        check_pd(config)


@pytest.mark.parametrize(
    "config",
    [
        ServeConfig(),
        ServeConfig(host="0.0.0.0"),
        ServeConfig(role="prefill"),
        ServeConfig(role="prefill", host="0.0.0.0", cluster_key_file="key"),
        ServeConfig(
            role="decode", prefill_peers=f"{HERE},tcp://localhost:1,tcp://[::1]:1,ipc://@p", local_prefill=False
        ),
        ServeConfig(role="decode", prefill_peers=THERE, cluster_key_file="key"),
        ServeConfig(role="mixed", prefill_peers=HERE),
        ServeConfig(role="decode", router="http://127.0.0.1:8080", local_prefill=False),
    ],
)
def test_what_can_work_is_let_through(config: ServeConfig) -> None:
    check_pd(config)


def test_a_decode_instance_without_peers_is_warned_about() -> None:
    assert "--prefill-peers" in pd_warnings(ServeConfig(role="decode"))[0]
    assert not pd_warnings(ServeConfig(role="decode", prefill_peers=HERE))
    assert not pd_warnings(ServeConfig(role="decode", router="http://127.0.0.1:8080"))
    assert not pd_warnings(ServeConfig())
