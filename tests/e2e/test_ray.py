"""`onward up --ray`: instances on several Ray nodes of this machine, whose nodes or raylets are killed in mid-stream."""

import os
import re
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.e2e.cluster import Port
from tests.e2e.pd_instances import wait_for
from tests.e2e.streams import Stream, chat_body, run_streams
from tests.e2e.test_lifecycle import alive
from tests.e2e.test_up import RunningCluster
from tests.e2e.test_upgrade import instances
from tests.ray.ray_nodes import RayNodes

pytestmark = pytest.mark.timeout(600)
FLAGS = ("--mixed", "2", "--threads", "1", "--standby-worker", "off", "--log-level", "info")
FENCE_S = 5.0
"""Within this time an instance whose raylet has died must have ended."""


@contextmanager
def cluster_on_ray(num_nodes: int) -> Iterator[tuple[RayNodes, RunningCluster]]:
    """A cluster with two instances. Afterwards no process of it is left, on any node."""
    with (
        closing(RayNodes(num_nodes)) as nodes,
        closing(Port()) as port,
        tempfile.TemporaryDirectory(prefix="onward-test-") as folder,
        closing(
            RunningCluster(folder, int(port.flags[1]), *FLAGS, "--ray", nodes.address, variables=nodes.variables)
        ) as running,
    ):
        yield nodes, running
        pids = [pid for one in instances(running.url()).values() for some in one["pids"].values() for pid in some]
        assert pids
        assert running.stop() == 0, running.log()
        assert not [pid for pid in pids if alive(pid)]


def placed(url: str) -> dict[str, dict]:
    """The ready instances by name, as the router knows them. Never two of one name."""
    known = list(instances(url).values())
    assert len({one["name"] for one in known}) == len(known), known
    return {one["name"]: one for one in known if one["state"] == "ready"}


class NameWatch:
    """Looks all the time whether two instances are registered under one name."""

    def __init__(self, url: str) -> None:
        self._url, self._stopped = url, threading.Event()
        self.fault: BaseException | None = None
        self.num_looks = 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        try:
            while not self._stopped.wait(0.1):
                placed(self._url)
                self.num_looks += 1
        except BaseException as fault:
            self.fault = fault

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        if self.fault is not None:
            raise self.fault
        assert self.num_looks, "it has looked"


def disturbed(url: str, bodies: list[dict], disturb: Callable[[], None]) -> list[tuple]:
    """Runs the streams, and calls `disturb` once when all of them have tokens."""
    faults: list[Future] = []

    def on_tokens(streams: list[Stream]) -> None:
        if not faults and all(len(stream.token_ids) >= 5 for stream in streams):
            faults.append(executor.submit(disturb))

    with ThreadPoolExecutor(1) as executor:
        results = [stream.result() for stream in run_streams(url, bodies, on_tokens)]
    assert faults, "the streams ended before the fault"
    faults[0].result()
    return results


def both_placed(url: str) -> dict[str, dict]:
    """The two instances. A router that has not heard from one for a moment on a busy machine hears from it again."""
    return wait_for(lambda: known if len(known := placed(url)) == 2 else None, "two ready instances")


def lose_a_node(nodes: RayNodes, running: RunningCluster, bodies: list[dict]) -> None:
    url = running.url()
    expected = [stream.result() for stream in run_streams(url, bodies)]
    before = both_placed(url)
    lost: list[int] = []
    with closing(NameWatch(url)):
        results = disturbed(url, bodies, lambda: lost.extend(nodes.kill_node(before["mixed-0"]["node"])))
        assert results == expected
        wait_for(
            lambda: "mixed-0" in placed(url) and placed(url)["mixed-0"]["id"] != before["mixed-0"]["id"], "it again"
        )
    after = both_placed(url)
    assert after["mixed-0"]["node"] not in {one["node"] for one in before.values()}, "another node has it"
    assert after["mixed-1"]["id"] == before["mixed-1"]["id"]
    assert not [pid for pid in lost if alive(pid)]


def lose_a_raylet(nodes: RayNodes, running: RunningCluster, bodies: list[dict]) -> None:
    url = running.url()
    expected = [stream.result() for stream in run_streams(url, bodies)]
    before = both_placed(url)
    pids = [pid for some in before["mixed-0"]["pids"].values() for pid in some]
    pidfds = [os.pidfd_open(pid) for pid in pids]
    left: list[int] = []

    def kill_raylet() -> None:
        nodes.kill_raylet(before["mixed-0"]["node"])
        for pidfd in pidfds:
            left.extend([] if select.select([pidfd], [], [], FENCE_S)[0] else [pidfd])

    with closing(NameWatch(url)):
        assert disturbed(url, bodies, kill_raylet) == expected
        assert not left, "the instance still runs"
        wait_for(
            lambda: "mixed-0" in placed(url) and placed(url)["mixed-0"]["id"] != before["mixed-0"]["id"], "it again"
        )
    assert both_placed(url)["mixed-0"]["node"] != before["mixed-0"]["node"]
    for pidfd in pidfds:
        os.close(pidfd)


def test_streams_go_on_when_a_ray_node_is_lost_and_its_instance_comes_back_on_another_one() -> None:
    bodies = [chat_body(index, 60) for index in range(4)]
    with cluster_on_ray(3) as (nodes, running):
        lose_a_node(nodes, running, bodies)


@pytest.mark.full
def test_no_stream_of_many_is_lost_with_a_node_or_with_a_raylet_alone() -> None:
    bodies = [chat_body(index, 120) for index in range(32)]
    with cluster_on_ray(4) as (nodes, running):
        lose_a_node(nodes, running, bodies)
        lose_a_raylet(nodes, running, bodies)


@pytest.mark.full
def test_a_cluster_on_its_own_ray_is_scaled_and_leaves_nothing_behind() -> None:
    with closing(Port()) as port, tempfile.TemporaryDirectory(prefix="onward-test-") as folder:
        flags = ("--mixed", "1", "--threads", "1", "--standby-worker", "off", "--ray")
        with closing(RunningCluster(folder, int(port.flags[1]), *flags)) as running:
            url, pids = running.url(), running.pids()
            bodies = [chat_body(index, 60) for index in range(4)]
            expected = [stream.result() for stream in run_streams(url, bodies)]

            def scale(number: int) -> None:
                command = [sys.executable, "-m", "onward.cli.main", "scale", url, "--mixed", str(number)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr

            scale(2)
            wait_for(lambda: len(placed(url)) == 2, "two instances")
            assert disturbed(url, bodies, lambda: scale(1)) == expected
            assert placed(url).keys() == {"mixed-0"}
            assert re.search(r"mixed-0 +\d", running.row("mixed-0"))
            pids += running.pids()
            assert running.stop() == 0, running.log()
        assert not [pid for pid in pids if alive(pid)]
        assert [path.name for path in Path(folder).iterdir()] == ["log"]
