import argparse
import json
import socket
import sys
from pathlib import Path

import pytest

from onward.cli import router, serve, up
from onward.cli.cluster_plan import (
    FrontendKeys,
    InstanceCounts,
    ReservedPorts,
    bound,
    plan,
    plan_router,
    port_holder,
    reserve_ports,
)
from onward.cli.flags import from_args
from onward.cli.main import run
from onward.cli.up import check_router_flags, counts_of, instance_flags, member_line, threads_each, threads_line
from onward.config import RouterConfig, ServeConfig
from onward.errors import StartupError
from onward.supervisor.cluster_key import key_in_memory, new_key, read_key
from onward.supervisor.pd_config import resolve_pd
from onward.supervisor.registration_config import resolve_registration

PORTS = ReservedPorts(http=(9001, 9002, 8000, 9003, 9004), handoff=(7001, 7002))


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    return parser.parse_args(argv)


def config_of(command: tuple[str, ...]) -> ServeConfig:
    """What `onward serve` makes of a planned command."""
    assert command[:4] == (sys.executable, "-m", "onward.cli.main", "serve")
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return from_args(parser.parse_args(command[4:]), ServeConfig)


def router_config_of(command: tuple[str, ...]) -> RouterConfig:
    assert command[:4] == (sys.executable, "-m", "onward.cli.main", "router")
    parser = argparse.ArgumentParser()
    router.add_arguments(parser)
    return from_args(parser.parse_args(command[4:]), RouterConfig)


def test_a_cluster_is_one_of_each_kind_unless_told_otherwise() -> None:
    assert counts_of(None, None, None) == InstanceCounts(1, 1, 0)
    assert counts_of(2, None, None) == InstanceCounts(2, 1, 0)
    assert counts_of(None, 3, 1) == InstanceCounts(1, 3, 1)
    assert counts_of(None, None, 2) == InstanceCounts(0, 0, 2)
    assert counts_of(0, 1, None) == InstanceCounts(0, 1, 0)


def test_instances_on_cuda_devices_do_both() -> None:
    assert counts_of(None, None, None, "cuda") == InstanceCounts(0, 0, 1)
    assert counts_of(None, None, 2, "cuda") == InstanceCounts(0, 0, 2)
    with pytest.raises(StartupError, match="cannot exchange KV"):
        counts_of(1, 1, None, "cuda")


@pytest.mark.parametrize(
    ("counts", "named"),
    [
        ((0, 0, 0), "no instance would take requests"),
        ((2, 0, None), "no instance would take requests"),
        ((1, 0, 1), "--prefill"),
        ((-1, 1, 0), "--prefill"),
        ((1, 1, -1), "--mixed"),
        ((30, 30, 30), "90 instances"),
    ],
)
def test_a_cluster_that_cannot_work_is_refused(counts: tuple[int, int, int | None], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        counts_of(*counts)


def test_cores_are_divided_and_everyone_gets_one() -> None:
    assert (threads_each(16, 3), threads_each(2, 2), threads_each(2, 5)) == (5, 1, 1)


def test_the_line_about_threads_names_the_ranks() -> None:
    assert threads_line(2, 1, 4, 8) == "2 instances with --threads 4 each, on 8 cores"
    assert threads_line(2, 3, 1, 8) == "2 instances of 3 ranks, each rank with --threads 1, on 8 cores"


def test_every_instance_gets_its_role_its_ports_and_its_peers() -> None:
    plans = plan(InstanceCounts(2, 2, 1), [], "127.0.0.1", 3, PORTS, "/dev/fd/9")
    configs = [config_of(told.command) for told in plans]
    assert [told.name for told in plans] == ["prefill-0", "prefill-1", "decode-0", "decode-1", "mixed-0"]
    assert [config.role for config in configs] == ["prefill", "prefill", "decode", "decode", "mixed"]
    assert [config.port for config in configs] == [9001, 9002, 8000, 9003, 9004]
    assert [config.handoff_port for config in configs] == [7001, 7002, None, None, None]
    peers = "tcp://127.0.0.1:7001,tcp://127.0.0.1:7002"
    assert [config.prefill_peers for config in configs] == ["", "", peers, peers, ""]
    assert {config.threads for config in configs} == {3}
    assert {config.cluster_key_file for config in configs} == {"/dev/fd/9"}
    assert [told.handoff_address for told in plans] == [*peers.split(","), None, None, None]
    for config in configs:
        serve.check(config)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "192.0.2.1"])
def test_behind_a_router_all_stay_on_loopback_register_with_it_and_share_memory(host: str) -> None:
    ports = ReservedPorts((9001, 9002, 9003), (7001,), 8000)
    plans = plan(InstanceCounts(1, 1, 1), [], host, 1, ports, "k")
    configs = [config_of(told.command) for told in plans]
    assert {config.host for config in configs} == {"127.0.0.1"}
    assert {config.prefill_peers for config in configs} == {""}, "the router names them"
    reached = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    for config in configs:
        serve.check(config)
        told = resolve_registration(config, config.port)
        assert (told.router_urls, told.own_url) == ((f"http://{reached}:8000",), f"http://127.0.0.1:{config.port}")
    assert resolve_pd(configs[0], "ab" * 32, 7001).handoff_address == "tcp://127.0.0.1:7001"
    assert resolve_pd(configs[1], "ab" * 32, None).kv_backend == "shm"


def test_the_router_gets_the_front_port_its_own_flags_and_those_it_shares() -> None:
    args = arguments(
        *("--policy", "prefix", "--preempt-retry-count", "0", "--tell-resumes", "--api-key", "k", "--max-queue", "7"),
        *("--detach-ttl-s", "9", "--stall-timeout-s", "70"),
    )
    told = plan_router(up.router_flags(args), "127.0.0.1", 8000, "key", up.frontend_keys_from_args(args, "127.0.0.1"))
    config = router_config_of(told.command)
    assert (told.url, told.threads) == ("http://127.0.0.1:8000", None)
    assert (config.host, config.port, config.cluster_key_file) == ("127.0.0.1", 8000, "key")
    assert (config.policy, config.preempt_retry_count, config.report_resumes) == ("prefix", 0, True)
    assert told.environment == {"ONWARD_API_KEY": "k"} and "k" not in told.command, "others can read command lines"
    assert config.detach_ttl_s == 9
    assert config.stall_timeout_s == RouterConfig().stall_timeout_s, "what an instance calls so is another thing"
    [instance] = plan(
        InstanceCounts(0, 0, 1), instance_flags(args), "127.0.0.1", 1, ReservedPorts((9001,), (), 8000), "key"
    )
    assert (config_of(instance.command).detach_ttl_s, config_of(instance.command).max_queue) == (9, 7)


def test_every_decode_instance_has_a_port_of_its_own_for_kv() -> None:
    args = arguments("--kv-port", "7100")
    ports = ReservedPorts(PORTS.http, PORTS.handoff, None, args.kv_port)
    plans = plan(InstanceCounts(2, 2, 1), instance_flags(args), "127.0.0.1", 1, ports, "k")
    assert [config_of(told.command).kv_port for told in plans] == [0, 0, 7100, 7101, 0]
    up.check_kv_ports(65534, InstanceCounts(1, 2, 0))
    with pytest.raises(StartupError, match=r"--kv-port 65534.*65536"):
        up.check_kv_ports(65534, InstanceCounts(1, 3, 0))


def test_flags_of_a_router_that_is_left_out_or_cannot_work_are_named() -> None:
    assert arguments().with_router
    check_router_flags(arguments("--policy", "session"))
    check_router_flags(arguments("--no-router"))
    with pytest.raises(StartupError, match=r"--policy.*--no-router"):
        check_router_flags(arguments("--policy", "session", "--no-router"))
    with pytest.raises(StartupError, match="--preempt-retry-count"):
        check_router_flags(arguments("--preempt-retry-count", "-1"))


def test_who_takes_requests_has_the_port_that_was_asked_for(unused_port: int) -> None:
    with port_holder() as holder:
        ports = reserve_ports(holder, InstanceCounts(2, 1, 1), "127.0.0.1", unused_port, with_router=False)
        plans = plan(InstanceCounts(2, 1, 1), [], "127.0.0.1", 1, ports, "k")
        assert len({*ports.http, *ports.handoff}) == 6
        assert plans[2].url == f"http://127.0.0.1:{unused_port}"
    with port_holder() as holder:
        ports = reserve_ports(holder, InstanceCounts(2, 1, 1), "127.0.0.1", unused_port, with_router=True)
        assert len({*ports.http, *ports.handoff}) == 6
        assert ports.router == unused_port
        assert unused_port not in ports.http


def test_a_reserved_port_is_open_to_one_child_after_another_and_to_nobody_who_is_careless(unused_port: int) -> None:
    with port_holder() as holder:
        reserve_ports(holder, InstanceCounts(0, 1, 0), "127.0.0.1", unused_port, with_router=True)
        for _ in range(3):
            with (
                serve.listen("127.0.0.1", unused_port, "--port") as child,
                socket.create_connection(child.getsockname()) as client,
                child.accept()[0],  # closed before the client's end: the port keeps a trace of it
            ):
                assert client
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", unused_port))


def test_a_taken_port_is_named(unused_port: int) -> None:
    with (
        bound("127.0.0.1", unused_port) as taken,
        pytest.raises(StartupError, match=f"127.0.0.1:{unused_port}.*--port"),
    ):
        taken.listen()
        with port_holder() as holder:
            reserve_ports(holder, InstanceCounts(0, 1, 0), "127.0.0.1", unused_port, with_router=True)


def test_without_a_router_prefill_instances_stay_on_loopback_whatever_the_host() -> None:
    plans = plan(InstanceCounts(1, 1, 0), [], "0.0.0.0", 1, ReservedPorts((1, 2), (3,)), "k")
    assert [config_of(told.command).host for told in plans] == ["127.0.0.1", "0.0.0.0"]


def test_the_flags_of_serve_are_passed_on_to_every_instance() -> None:
    args = arguments(
        *("--model", "m", "--kv-backend", "tcp", "--no-local-prefill", "--output-caching", "--lease-s", "0.5"),
        "--no-prefix-caching",
        *(
            "--cors-origin",
            "a",
            "--cors-origin",
            "b",
            "--port",
            "8000",
            "--threads",
            "4",
            "--host",
            "h",
            "--mixed",
            "2",
        ),
    )
    [told] = plan(InstanceCounts(0, 0, 1), instance_flags(args), "127.0.0.1", 4, ReservedPorts((8000,), ()), "k")
    config = config_of(told.command)
    assert (config.model, config.kv_backend, config.local_prefill, config.output_caching) == ("m", "tcp", False, True)
    assert not config.prefix_caching
    assert (config.lease_s, config.cors_origin, config.threads, config.host) == (0.5, ("a", "b"), 4, "127.0.0.1")


def test_instances_are_called_what_their_lines_are() -> None:
    plans = plan(InstanceCounts(1, 2, 1), [], "127.0.0.1", 1, ReservedPorts((1, 2, 3, 4), (5,)), "k")
    assert [config_of(told.command).instance_name for told in plans] == [told.name for told in plans]
    assert [told.name for told in plans] == ["prefill-0", "decode-0", "decode-1", "mixed-0"]


def test_flags_that_are_one_instances_own_are_not_taken() -> None:
    for flag in ("--role", "--handoff-port", "--prefill-peers", "--cluster-key-file", "--record", "--advertise-url"):
        with pytest.raises(SystemExit):
            arguments(flag, "prefill")


def test_a_cluster_of_nobody_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["up", "--prefill", "0", "--decode", "0"]) == 1
    assert capsys.readouterr().err.startswith("onward up: no instance would take requests")


def test_the_clusters_key_is_readable_through_its_descriptor_only_by_its_owner() -> None:
    with key_in_memory(new_key()) as fd:
        assert len(read_key(f"/dev/fd/{fd}")) == 64


def test_with_a_router_only_the_router_hears_of_keys_and_without_one_those_who_take_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONWARD_API_KEY", "ours")
    args = arguments("--insecure")
    front = up.frontend_keys_from_args(args, "0.0.0.0")
    assert front == FrontendKeys(("--insecure",), "ours", has_keys=True)
    behind = plan(
        InstanceCounts(1, 1, 0), instance_flags(args), "0.0.0.0", 1, ReservedPorts((1, 2), (3,), 8000), "k", front
    )
    assert [told.environment for told in behind] == [{"ONWARD_API_KEY": ""}] * 2
    assert not any(config_of(told.command).insecure for told in behind)
    alone = plan(InstanceCounts(1, 1, 0), instance_flags(args), "0.0.0.0", 1, ReservedPorts((1, 2), (3,)), "k", front)
    assert [told.environment["ONWARD_API_KEY"] for told in alone] == ["", "ours"]
    assert [config_of(told.command).insecure for told in alone] == [False, True]
    assert not any(told.reloads_on_sighup for told in (*behind, *alone)), "there is nothing to be read again"
    with pytest.raises(StartupError, match="one --api-key"):
        up.frontend_keys_from_args(arguments("--api-key", "a", "--api-key", "b"), "127.0.0.1")
    monkeypatch.delenv("ONWARD_API_KEY")
    with pytest.raises(StartupError, match="--insecure"):
        up.frontend_keys_from_args(arguments(), "0.0.0.0")


def test_a_hangup_is_for_whoever_has_the_file_of_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    assert run(["keys", "add", str(keys), "ann"]) == 0
    args = arguments("--api-keys", str(keys))
    front = up.frontend_keys_from_args(args, "127.0.0.1")
    assert plan_router([], "127.0.0.1", 8000, "k", front).reloads_on_sighup
    behind = plan(
        InstanceCounts(1, 1, 0), instance_flags(args), "127.0.0.1", 1, ReservedPorts((1, 2), (3,), 8000), "k", front
    )
    assert [told.reloads_on_sighup for told in behind] == [False, False]
    alone = plan(InstanceCounts(1, 1, 0), instance_flags(args), "127.0.0.1", 1, ReservedPorts((1, 2), (3,)), "k", front)
    assert [told.reloads_on_sighup for told in alone] == [False, True]


def test_a_line_of_json_stays_one_and_says_of_which_instance_it_is() -> None:
    line = member_line('decode-"0"', '{"time": "t", "event": "x"}')
    assert json.loads(line) == {"instance": 'decode-"0"', "time": "t", "event": "x"}
    assert member_line("router", "worker lost pid=3") == "router    | worker lost pid=3"
