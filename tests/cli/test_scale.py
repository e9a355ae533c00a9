import socket
from pathlib import Path

import pytest

from onward.cli import up
from onward.cli.cluster_plan import (
    AddedInstances,
    InstanceCounts,
    ReservedPorts,
    ServedModel,
    instance_plan,
    port_holder,
)
from onward.cli.cluster_scaling_flags import ScalingFactory, limits_from_args, max_instances
from onward.cli.main import run
from onward.errors import StartupError
from onward.supervisor.cluster_key import write_key
from onward.supervisor.cluster_member import ClusterMember
from onward.supervisor.scaling_policy import ScalingLimits
from tests.cli.test_up import arguments, config_of
from tests.supervisor.test_no_start import files_left, open_files


def limits(*argv: str, counts: InstanceCounts | None = None, num_models: int = 1) -> ScalingLimits | None:
    return limits_from_args(arguments(*argv), counts or InstanceCounts(0, 0, 1), num_models)


def test_the_load_decides_nothing_unless_there_is_a_maximum() -> None:
    assert limits() is None
    assert limits("--max", "3") == ScalingLimits(1, 3, 5.0, 120.0)
    told = limits("--min", "2", "--max", "3", "--scale-up-after-s", "0", "--scale-down-after-s", "9")
    assert told == ScalingLimits(2, 3, 0.0, 9.0)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--min", "2"), "--min is for scaling by load: give --max too"),
        (("--scale-up-after-s", "2"), "--scale-up-after-s is for scaling by load"),
        (("--min", "0", "--max", "2"), "--min 0 and --max 2"),
        (("--min", "3", "--max", "2"), "--min 3 and --max 2"),
        (("--max", "2", "--scale-down-after-s", "-1"), "--scale-down-after-s must be"),
        (("--max", "2", "--scale-up-after-s", "nan"), "--scale-up-after-s must be"),
        (("--max", "65"), "65 instances are more than the 64"),
        (("--max", "2", "--no-router"), "--max needs a router"),
    ],
)
def test_limits_that_cannot_work_are_named(argv: tuple[str, ...], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        limits(*argv)


def test_cores_are_divided_by_the_largest_number_of_instances() -> None:
    counts = InstanceCounts(1, 2, 0)
    assert max_instances(counts, None, 2) == 3
    assert max_instances(counts, ScalingLimits(1, 3), 1) == 4
    assert max_instances(InstanceCounts(0, 0, 2), ScalingLimits(1, 3), 2) == 6


def test_an_instance_that_is_added_is_planned_like_the_others() -> None:
    args = arguments("--kv-port", "7100", "--max-num-seqs", "4")
    ports = ReservedPorts((1, 2), (3,), 8000, 7100)
    model = ServedModel("m", ("--model", "m"))
    with port_holder() as holder:
        instances = instance_plan(up.instance_flags(args), "127.0.0.1", 2, ports, "k")
        planner = AddedInstances(instances, holder, {"m": model})
        first = instances.member("decode-0", 2, None, model)
        second = planner.plan_member("decode", "m", [ClusterMember(first)])
        assert (second.name, second.role, second.model) == ("decode-1", "decode", "m")
        own, other = config_of(first.command), config_of(second.command)
        assert (own.kv_port, other.kv_port) == (7100, 7101)
        assert (other.router, other.threads, other.max_num_seqs, other.model) == ("http://127.0.0.1:8000", 2, 4, "m")
        assert other.advertise_url == second.url == f"http://127.0.0.1:{other.port}"
        prefill = planner.plan_member("prefill", "m", [ClusterMember(first)])
        assert prefill.name == "prefill-0" and prefill.handoff_address is not None
        assert config_of(prefill.command).handoff_port == int(prefill.handoff_address.rpartition(":")[2])
        planner.release(prefill)
        with socket.socket() as reused:
            reused.bind(("127.0.0.1", config_of(prefill.command).port))


def test_a_kv_port_that_is_none_is_refused_and_nothing_stays_reserved() -> None:
    ports = ReservedPorts((1,), (), 8000, 65535)
    with port_holder() as holder:
        instances = instance_plan([], "127.0.0.1", 1, ports, "k")
        planner = AddedInstances(instances, holder, {"": ServedModel()})
        first = instances.member("decode-0", 1, None, ServedModel())
        with pytest.raises(StartupError, match="--kv-port 65535: decode-1 would need port 65536"):
            planner.plan_member("decode", "", [ClusterMember(first)])
        assert not holder._sockets


def test_a_command_without_numbers_or_a_cluster_says_so(capsys: pytest.CaptureFixture[str], unused_port: int) -> None:
    assert run(["scale", f"http://127.0.0.1:{unused_port}"]) == 1
    assert "give a number of instances" in capsys.readouterr().err
    assert run(["scale", "--mixed", "-1"]) == 1
    assert "--mixed must not be negative" in capsys.readouterr().err
    assert run(["scale", f"http://127.0.0.1:{unused_port}", "--mixed", "2"]) == 1
    assert f"no `onward up` of this user has port {unused_port}" in capsys.readouterr().err


@pytest.mark.parametrize("num_files", [0, 1])
def test_without_free_file_descriptors_no_instance_is_added_and_no_port_stays_reserved(num_files: int) -> None:
    """A prefill instance needs two ports."""
    with port_holder() as holder:
        planned = instance_plan([], "127.0.0.1", 1, ReservedPorts((1,), (), 8000), "k")
        added = AddedInstances(planned, holder, {"": ServedModel()})
        open_before = open_files()
        with files_left(num_files), pytest.raises(StartupError, match="Too many open files"):
            added.plan_member("prefill", "", [])
        assert open_files() == open_before


def test_without_free_file_descriptors_the_load_is_unknown(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    write_key(key_file)
    counts = InstanceCounts(0, 0, 1)
    factory = ScalingFactory([ServedModel()], limits("--max", "2"), counts, "cpu", "http://127.0.0.1:1", str(key_file))
    by_load = factory(None).by_load  # type: ignore[arg-type]
    assert by_load is not None
    for num_files in (0, 1):
        with files_left(num_files):
            assert by_load.read_load() == {}
