"""What a cluster on Ray does with the reports of its members, without Ray."""

import os
import signal
from collections.abc import Callable

import pytest
from ray.exceptions import ActorUnavailableError

from onward.errors import StartupError
from onward.ray.member_actor import MemberReport
from onward.ray.node_guard import NODE_LOST
from onward.ray.ray_cluster import RayCluster
from onward.ray.ray_member import MemberResources, MemberStart
from onward.supervisor.cluster_member import MemberSpec
from onward.supervisor.cluster_scaling import ClusterScaling
from tests.ray.stand_in_ray import NewRay, new_ray
from tests.supervisor.test_local_cluster import signal_handlers

__all__ = ["new_ray", "signal_handlers"]
READY = MemberReport("node", is_ready=True)
NOTHING = MemberReport("node")
ONE_CORE = MemberResources(1.0)


class FastClock:
    """Half a second passes between two looks at it."""

    at_s = 0.0

    def now_s(self) -> float:
        self.at_s += 0.5
        return self.at_s

    wall_s = now_s


def no_more(*_: object) -> MemberSpec:
    raise StartupError("nothing is added")


def cluster_of(
    *names: str,
    on_ready: Callable[[RayCluster], None],
    on_line: Callable[[str, str], None] = lambda *_: None,
    resources: MemberResources = ONE_CORE,
) -> RayCluster:
    """A cluster whose router reads keys from a file."""
    specs = [
        MemberSpec(name, name.split("-")[0], (name,), "", None, 1, reloads_on_sighup=name == "router") for name in names
    ]
    return RayCluster(
        specs,
        FastClock(),
        MemberStart("k", "  Onward ", "", resources, "driver"),
        drain_s=5.0,
        plan_member=no_more,
        on_line=on_line,
        on_ready=on_ready,
        new_scaling=lambda cluster: ClusterScaling(cluster, [""], lambda _: None),
    )


def stop(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_hangup_reaches_those_who_have_a_file_of_keys_once_they_are_ready(new_ray: NewRay) -> None:
    """The first comes before the router is ready, and the second afterwards."""

    def on_line(_: str, line: str) -> None:
        os.kill(os.getpid(), getattr(signal, line))

    signal.signal(signal.SIGHUP, lambda *_: None)  # until the cluster has its own
    early, late, end = (MemberReport("node", lines=[line]) for line in ("SIGHUP", "SIGHUP", "SIGTERM"))
    ray = new_ray({"router": [[early, NOTHING, READY, NOTHING, late, NOTHING, end]], "mixed-0": [[READY]]})
    cluster_of("router", "mixed-0", on_ready=lambda _: None, on_line=on_line).run()
    [router], [instance] = ray.actors["router"], ray.actors["mixed-0"]
    assert router.signals == [signal.SIGHUP, signal.SIGHUP, signal.SIGTERM]
    assert instance.signals == [signal.SIGTERM], "it would end of a SIGHUP"


def test_an_instance_whose_raylet_dies_while_it_starts_is_started_again(new_ray: NewRay) -> None:
    lost = MemberReport("node", lines=["a line of its log"], exit_code=NODE_LOST)
    ray = new_ray({"router": [[READY]], "mixed-0": [[NOTHING, lost], [READY]]})
    cluster_of("router", "mixed-0", on_ready=stop).run()
    assert [actor.command[-2:] for actor in ray.actors["mixed-0"]] == [
        ("--instance-generation", "1"),
        ("--instance-generation", "2"),
    ]


def test_an_instance_that_cannot_start_ends_the_cluster_with_its_own_words(new_ray: NewRay) -> None:
    new_ray({"mixed-0": [[MemberReport("node", lines=["onward serve: no such model"], exit_code=1)]]})
    with pytest.raises(StartupError, match=r"^mixed-0 cannot start: no such model$"):
        cluster_of("mixed-0", on_ready=stop).run()


def test_an_instance_is_ready_although_a_reply_was_lost_and_is_so_once(new_ray: NewRay) -> None:
    lost = ActorUnavailableError("the connection is interrupted", None)
    end = MemberReport("node", is_ready=True, lines=["end"])
    new_ray({"router": [[READY, READY, READY]], "mixed-0": [[lost, READY, READY, READY, end]]})
    numbers: list[int] = []
    cluster = cluster_of("router", "mixed-0", on_ready=lambda made: numbers.append(len(made.members)), on_line=stop)
    members = list(cluster.members)
    cluster.run()
    assert numbers == [2]
    assert [member.num_times_ready for member in members] == [1, 1]


@pytest.mark.parametrize(
    ("resources", "bundle"),
    [
        (ONE_CORE, {"CPU": 1.0}),
        (MemberResources(2.0, 1.0, "10.0.0.1"), {"CPU": 2.0, "GPU": 1.0, "node:10.0.0.1": 0.001}),
    ],
)
def test_instances_that_listen_on_loopback_are_placed_on_the_machine_of_the_router(
    new_ray: NewRay, resources: MemberResources, bundle: dict[str, float]
) -> None:
    """Machines can join the Ray cluster at any time."""
    ray = new_ray({"router": [[READY]], "mixed-0": [[READY]]})
    cluster_of("router", "mixed-0", on_ready=stop, resources=resources).run()
    assert ray.bundles == [bundle]
