"""The flags and command lines of `onward up --ray`."""

import argparse

import pytest

from onward.cli import ray_flags, router, serve, up
from onward.cli.cluster_plan import FrontendKeys, InstanceCounts, ServedModel
from onward.cli.flags import from_args
from onward.cli.ray_plan import RayInstances, RayPlan
from onward.config import RouterConfig, ServeConfig
from onward.errors import StartupError
from onward.supervisor.cluster_member import MemberSpec
from tests.cli.test_up import arguments


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--node-timeout-s", "2"), "--node-timeout-s is for a cluster on Ray"),
        (("--gpus-per-rank", "1"), "--gpus-per-rank is for a cluster on Ray"),
        (("--ray", "smollm2"), "--ray 'smollm2' is not an address"),
        (("--ray", "--no-router"), "--ray needs a router"),
        (("--ray", "--kv-port", "7000"), "--kv-port cannot be given with --ray"),
        (("--ray", "auto", "--node-timeout-s", "2"), "RAY_health_check_period_ms"),
        (("--ray", "--node-timeout-s", "0"), "--node-timeout-s must be a positive"),
        (("--ray", "--gpus-per-rank", "-1"), "--gpus-per-rank must not be negative"),
    ],
)
def test_flags_that_cannot_work_are_named(argv: tuple[str, ...], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        ray_flags.check(arguments(*argv))


def test_a_cluster_on_ray_is_a_new_one_unless_there_is_an_address() -> None:
    for argv in (("--ray",), ("--ray", "auto"), ("--ray", "10.0.0.1:6379"), ()):
        ray_flags.check(arguments(*argv))
    assert arguments().ray is None
    assert ray_flags.options_from_args(arguments("--ray")) == ray_flags.RayOptions("local", 2.0, 0.0)
    told = ray_flags.options_from_args(arguments("--ray", "10.0.0.1:6379", "--gpus-per-rank", "0.5"))
    assert (told.address, told.gpus_per_rank) == ("10.0.0.1:6379", 0.5)


def parsed(module: object, spec: MemberSpec, config: type) -> object:
    assert spec.command[:2] == ("-m", "onward.cli.main")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)  # type: ignore[attr-defined]
    return from_args(parser.parse_args(spec.command[3:]), config)


def test_instances_are_planned_for_whatever_node_they_get() -> None:
    args = arguments("--max-num-seqs", "4", "--policy", "prefix")
    models = [ServedModel("a", ("--model", "a")), ServedModel("b", ("--model", "b"))]
    plan = RayPlan(InstanceCounts(1, 2, 0), up.instance_flags(args), up.router_flags(args), FrontendKeys(), models)
    instances = RayInstances(plan, "http://10.0.0.1:8000", 3, "secret")
    specs = instances.at_start()
    assert [(spec.name, spec.model) for spec in specs] == [("prefill-0", "a"), ("decode-0", "a"), ("decode-1", "b")]
    for spec in specs:
        config = parsed(serve, spec, ServeConfig)
        assert isinstance(config, ServeConfig)
        assert (config.port, config.router, config.threads) == (0, "http://10.0.0.1:8000", 3)
        assert (config.instance_name, config.role, config.max_num_seqs) == (spec.name, spec.role, 4)
        assert "secret" not in spec.command and spec.environment == {"ONWARD_API_KEY": "secret"}
    added = instances.added("decode", "b", [spec.name for spec in specs])
    assert (added.name, added.model) == ("decode-2", "b")
    told = parsed(router, plan.router("0.0.0.0", 8000), RouterConfig)
    assert isinstance(told, RouterConfig) and (told.host, told.port, told.policy) == ("0.0.0.0", 8000, "prefix")


@pytest.mark.parametrize("has_key_file", [False, True])
def test_a_router_with_a_file_of_keys_reads_it_again_after_a_hangup(has_key_file: bool) -> None:
    keys = FrontendKeys(("--api-keys", "keys.toml") if has_key_file else ())
    router = RayPlan(InstanceCounts(0, 0, 1), (), (), keys, [ServedModel()]).router("127.0.0.1", 8000)
    assert router.reloads_on_sighup == has_key_file
