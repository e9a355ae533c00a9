"""A supervisor kills for an api process with `--demo` only, and exactly what was asked for."""

import pytest

from onward.proto.demo import RequestKill
from onward.supervisor.children import ProcessRole
from onward.supervisor.core import KillInstance, KillProcess
from tests.supervisor.instance_of_core import InstanceOfCore

API = ProcessRole.API


@pytest.mark.parametrize("target", ["worker", "engine"])
def test_the_process_of_the_role_is_killed(target: str) -> None:
    instance = InstanceOfCore(allows_kills=True)
    instance.make_ready()
    instance.receive(API, RequestKill(target))  # type: ignore[arg-type]
    [kill] = [action for action in instance.take() if isinstance(action, KillProcess)]
    assert (kill.child, kill.cause) == (instance.child(ProcessRole(target)), "demo")


def test_the_whole_instance_is_killed() -> None:
    instance = InstanceOfCore(allows_kills=True)
    instance.make_ready()
    instance.receive(API, RequestKill("instance"))
    assert KillInstance() in instance.take()


def test_without_demo_nothing_is_killed() -> None:
    instance = InstanceOfCore()
    instance.make_ready()
    for target in ("worker", "engine", "instance"):
        instance.receive(API, RequestKill(target))
    assert not [action for action in instance.take() if isinstance(action, KillProcess | KillInstance)]
