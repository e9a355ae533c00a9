"""`onward scale` and scaling by load while streams go through the router of an `onward up`."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from tests.e2e.cluster import Port
from tests.e2e.pd_instances import wait_for
from tests.e2e.streams import chat_body, run_streams
from tests.e2e.test_up import RunningCluster
from tests.e2e.test_upgrade import Load, instances

FLAGS = ("--standby-worker", "off", "--log-level", "info", "--threads", "1")
BODIES = [chat_body(index, 150) for index in range(4)]


@contextmanager
def cluster(*flags: str) -> Iterator[RunningCluster]:
    with (
        closing(Port()) as port,
        tempfile.TemporaryDirectory(prefix="onward-test-") as folder,
        closing(RunningCluster(folder, int(port.flags[1]), *FLAGS, *flags)) as running,
    ):
        yield running


def scale(url: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "onward.cli.main", "scale", url, *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def num_ready(url: str) -> int:
    return sum(instance["state"] == "ready" for instance in instances(url).values())


def test_instances_are_added_and_removed_in_mid_stream_and_nothing_is_lost() -> None:
    with cluster("--mixed", "1") as running:
        url = running.url()
        undisturbed = [stream.result() for stream in run_streams(url, BODIES)]
        load = Load(url, BODIES)
        try:
            added = scale(url, "--mixed", "3")
            wait_for(lambda: num_ready(url) == 3, "three instances")
            wait_for(lambda: all(one["streams"] for one in instances(url).values()), "streams on all of them")
            removed = scale(url, "--mixed", "1")
        finally:
            load.end()
        assert added.returncode == 0 and sorted(added.stderr.splitlines()) == ["mixed-1 is added", "mixed-2 is added"]
        assert removed.returncode == 0, removed.stderr
        assert sorted(removed.stderr.splitlines()) == ["mixed-1 is removed", "mixed-2 is removed"]
        assert load.results and all(result == undisturbed for result in load.results)
        wait_for(lambda: len(instances(url)) == 1, "one instance")
        assert running.log().count("instance died") == 0
        assert running.stop() == 0


@pytest.mark.full
def test_the_load_decides_how_many_instances_there_are() -> None:
    flags = (
        "--mixed",
        "1",
        "--max-num-seqs",
        "2",
        "--max",
        "2",
        "--scale-up-after-s",
        "0",
        "--scale-down-after-s",
        "1",
    )
    with cluster(*flags) as running:
        url = running.url()
        load = Load(url, BODIES)
        try:
            wait_for(lambda: num_ready(url) == 2, "a second instance")
            fixed = scale(url, "--mixed", "1")
        finally:
            load.end()
        assert fixed.returncode == 1 and "are scaled by load, between --min 1 and --max 2" in fixed.stderr
        wait_for(lambda: len(instances(url)) == 1, "one instance again")
        assert all(result == load.results[0] for result in load.results)


def test_a_cluster_without_a_router_is_not_scaled() -> None:
    with cluster("--mixed", "1", "--no-router") as running:
        refused = scale(running.url(), "--mixed", "2")
    assert refused.returncode == 1
    assert "no router is in front of" in refused.stderr
