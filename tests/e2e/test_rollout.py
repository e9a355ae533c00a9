"""A rolling restart as Kubernetes performs it: preStop and SIGTERM within one grace period, then SIGKILL; and the last pod
of all.

The preStop command is the one in deploy/kubernetes/mixed.yaml. The answers to compare with are an undisturbed instance's.
"""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from onward.supervisor.cluster_key import write_key
from tests.deploy.manifests import stateful_sets
from tests.e2e.cluster import Cluster, Instance
from tests.e2e.pd_instances import wait_for
from tests.e2e.streams import Stream, chat_body, run_streams

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

NUM_STREAMS = 32
MAX_TOKENS = 900
"""About a minute for each of the streams, on two cores that have nothing else to do."""
GRACE_S = 30.0
"""Grace period of a pod, which Kubernetes counts from the beginning of preStop. Every stream is longer."""
INSTANCE = ("--threads", "1", "--max-num-seqs", "32", "--num-kv-blocks", "2400", "--log-interval-s", "0")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("secrets") / "cluster.key"
    write_key(file)
    return file


def cluster_of(num_instances: int, key_file: Path) -> Cluster:
    key = ("--cluster-key-file", str(key_file))
    every = (*INSTANCE, *key)
    # On a busy machine a step may take long. Only drains are to move streams here.
    router = (*key, "--stall-timeout-s", "120")
    return Cluster(router=router, every=every, prefill=(), decode=(), mixed=((),) * num_instances)


@pytest.fixture
def cluster(key_file: Path) -> Iterator[Cluster]:
    with cluster_of(3, key_file) as cluster:
        yield cluster


def manifest() -> dict[str, Any]:
    return dict(stateful_sets())["onward-mixed"]


def pre_stop(pod: Instance, key_file: Path, timeout_s: float) -> int:
    """Runs the pod's preStop command as the kubelet would, in the pod's own network."""
    [container] = manifest()["containers"]
    own = {
        "http://127.0.0.1:8000": pod.url,
        "--cluster-key-file=/etc/onward/secrets/cluster.key": f"--cluster-key-file={key_file}",
    }
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert set(own) <= set(command)
    words = [own.get(word, word) for word in command[1:]]
    command_line = [sys.executable, "-m", "onward", *words]
    return subprocess.run(command_line, capture_output=True, timeout=timeout_s).returncode


def stop_as_the_kubelet_does(pod: Instance, key_file: Path, grace_s: float) -> None:
    """Runs preStop, then sends SIGTERM, and SIGKILL when the grace period is over. One clock counts for all of it. Fails if
    the pod did not end by itself."""
    killer = threading.Timer(grace_s, pod.server._process.kill)
    killer.start()
    try:
        assert pre_stop(pod, key_file, grace_s) == 0, pod.log()
        assert httpx.get(f"{pod.url}/health", timeout=60).status_code == 503, "readiness follows drain"
        assert httpx.get(f"{pod.url}/live", timeout=60).status_code == 200
        assert pod.server.stop(signal.SIGTERM) == 0, "the grace period was over before the pod ended"
    finally:
        killer.cancel()


def restart_one_after_the_other(cluster: Cluster, key_file: Path) -> None:
    for pod in cluster.instances:
        stop_as_the_kubelet_does(pod, key_file, GRACE_S)
        pod.start_again()
        cluster.wait_until_ready(pod)


def run_during(
    url: str, bodies: list[dict], disturb: Callable[[], None], begun_tokens: int
) -> tuple[list[Stream], float]:
    """Reads all streams, and disturbs once each of them has some tokens. Returns the streams, and the seconds from the
    first disturbance to the end of the stream that ends first."""
    streams = [Stream(body) for body in bodies]
    disturbed_at_s, ended_at_s = [], list[float]()

    async def read(client: httpx.AsyncClient, stream: Stream) -> None:
        await stream.read(client, lambda: None)
        ended_at_s.append(time.monotonic())

    async def run() -> None:
        limits = httpx.Limits(max_connections=len(bodies) + 1)
        async with (
            httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            for stream in streams:
                group.create_task(read(client, stream))
            await asyncio.to_thread(
                wait_for, lambda: all(len(stream.token_ids) >= begun_tokens for stream in streams), "tokens", 600
            )
            disturbed_at_s.append(time.monotonic())
            await asyncio.to_thread(disturb)

    asyncio.run(run())
    return streams, min(ended_at_s) - disturbed_at_s[0]


def bodies_of(count: int, max_tokens: int, salt: str) -> list[dict]:
    return [chat_body(index, max_tokens, cache_salt=salt) for index in range(count)]


def test_a_rolling_restart_cuts_no_stream_and_changes_no_text(cluster: Cluster, key_file: Path) -> None:
    undisturbed = run_streams(cluster.instances[0].url, bodies_of(NUM_STREAMS, MAX_TOKENS, "undisturbed"))
    with contextlib.ExitStack() as logs:
        logs.callback(lambda: print(*cluster.logs().values(), sep="\n---\n"))
        streams, shortest_s = run_during(
            cluster.url,
            bodies_of(NUM_STREAMS, MAX_TOKENS, "restarted"),
            lambda: restart_one_after_the_other(cluster, key_file),
            begun_tokens=2,
        )
        cut = [stream for stream in streams if not stream.done or stream.error is not None]
        assert not cut
        assert shortest_s > GRACE_S, "no stream could have ended in the grace period of its pod"
        assert [stream.result() for stream in streams] == [stream.result() for stream in undisturbed]
        resumes = {
            name: count
            for name, count in cluster.router.server.metrics().items()
            if name.startswith("onward_router_resumes_total{") and count
        }
        assert set(resumes) == {'onward_router_resumes_total{cause="drain",outcome="exact"}'}
        logs.pop_all()


def test_the_last_pod_finishes_its_streams_in_place(key_file: Path) -> None:
    with cluster_of(1, key_file) as cluster:
        [pod] = cluster.instances
        undisturbed = run_streams(pod.url, bodies_of(4, 200, "undisturbed"))

        def stop() -> None:
            stop_as_the_kubelet_does(pod, key_file, manifest()["terminationGracePeriodSeconds"])

        streams, _ = run_during(cluster.url, bodies_of(4, 200, "last"), stop, begun_tokens=2)
        assert not [stream for stream in streams if not stream.done or stream.error is not None]
        assert [stream.result() for stream in streams] == [stream.result() for stream in undisturbed]
        assert cluster.router.resumes("drain") == 0
