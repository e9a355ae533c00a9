"""`onward upgrade`: the instances of a cluster are replaced one after the other while streams go through its router."""

import json
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing

import pytest

from benchmarks.harness.metrics_text import parse_metrics
from tests.e2e.cluster import Port
from tests.e2e.streams import chat_body, run_streams
from tests.e2e.test_up import RunningCluster

NUM_TOKENS = 300
BLOCK_SIZE = 16
FLAGS = ("--mixed", "2", "--standby-worker", "off", "--max-num-seqs", "4", "--log-level", "info")
BODIES = [chat_body(index, NUM_TOKENS) for index in range(4)]


@pytest.fixture
def cluster() -> Iterator[RunningCluster]:
    with (
        closing(Port()) as port,
        tempfile.TemporaryDirectory(prefix="onward-test-") as folder,
        closing(RunningCluster(folder, int(port.flags[1]), *FLAGS)) as cluster,
    ):
        yield cluster


def upgrade(url: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "onward.cli.main", "upgrade", url]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url + "/metrics", timeout=30) as response:
        return parse_metrics(response.read().decode())


def instances(url: str) -> dict[str, dict]:
    """What the router knows of each, by URL."""
    with urllib.request.urlopen(url + "/internal/status", timeout=30) as response:
        return {instance["url"]: instance for instance in json.load(response)["instances"]}


class Load:
    """The same streams again and again until it is ended."""

    def __init__(self, url: str, bodies: list[dict] = BODIES) -> None:
        self._bodies = bodies
        self.results: list[list[tuple]] = []
        self.fault: BaseException | None = None
        self._url, self._has_ended = url, threading.Event()
        self._running = threading.Thread(target=self._run)
        self._running.start()

    def _run(self) -> None:
        try:
            while not self._has_ended.is_set():
                self.results.append([stream.result() for stream in run_streams(self._url, self._bodies)])
        except BaseException as fault:
            self.fault = fault

    def end(self) -> None:
        self._has_ended.set()
        self._running.join()
        if self.fault is not None:
            raise self.fault


def test_all_instances_are_replaced_and_streams_continue_with_their_cached_blocks(cluster: RunningCluster) -> None:
    url = cluster.url()
    undisturbed = [stream.result() for stream in run_streams(url, BODIES)]
    before = instances(url)
    load = Load(url)
    try:
        done = upgrade(url)
    finally:
        load.end()
    assert (done.returncode, done.stderr) == (0, "mixed-0 is replaced\nmixed-1 is replaced\n"), cluster.log()
    assert all(result == undisturbed for result in load.results)
    after = instances(url)
    assert before.keys() == after.keys()
    assert all(before[at]["incarnation"] != after[at]["incarnation"] for at in before)
    assert len(re.findall("cached blocks adopted", cluster.log())) == 2
    resumes = metrics(url).get('onward_router_resumes_total{cause="replaced",outcome="exact"}', 0.0)
    assert resumes >= 1, "no stream ran when an instance was replaced"
    recomputed = sum(metrics(at)['onward_recomputed_tokens_total{cause="resume"}'] for at in after)
    assert recomputed <= resumes * BLOCK_SIZE


def test_prompts_are_handed_over_again_after_a_prefill_and_a_decode_instance_were_replaced() -> None:
    """The new engines take the addresses of the old ones when these have ended."""
    flags = ("--prefill", "1", "--decode", "1", *FLAGS[2:], "--local-prefill-tokens", "0")
    with (
        closing(Port()) as port,
        tempfile.TemporaryDirectory(prefix="onward-test-") as folder,
        closing(RunningCluster(folder, int(port.flags[1]), *flags)) as pair,
    ):
        url, bodies = pair.url(), [chat_body(index, 20) for index in range(3)]
        undisturbed = [stream.result() for stream in run_streams(url, bodies)]
        done = upgrade(url)
        assert (done.returncode, done.stderr) == (0, "prefill-0 is replaced\ndecode-0 is replaced\n"), pair.log()
        assert [stream.result() for stream in run_streams(url, bodies)] == undisturbed
        handed_over = 'onward_pd_handoffs_total{outcome="arrived",side="decode"}'
        assert sum(metrics(at).get(handed_over, 0.0) for at in instances(url)) == len(bodies)


def test_an_upgrade_without_a_cluster_says_so() -> None:
    with closing(Port()) as port:
        done = upgrade(port.url)
    assert done.returncode == 1
    assert "no `onward up` of this user has port" in done.stderr
