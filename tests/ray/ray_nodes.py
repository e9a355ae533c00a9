"""Several Ray nodes on this machine: `RayNodes` runs this file as a program, because Ray would disturb the test process.

The program prints the nodes as one line of JSON, and ends them when its standard input is closed.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 120


class RayNodes:
    """A head node without cores for instances, and others with one core each."""

    def __init__(self, num_others: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="onw-ray-", ignore_cleanup_errors=True)
        self.variables = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": self._folder.name,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._folder.name, str(num_others)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | self.variables,
            text=True,
        )
        watchdog = threading.Timer(START_TIMEOUT_S, self._process.kill)
        watchdog.start()
        try:
            assert self._process.stdout is not None
            told = json.loads(self._process.stdout.readline())
        finally:
            watchdog.cancel()
        self.address: str = told["address"]
        self.raylets: dict[str, int] = told["raylets"]
        """Process ids by the beginning of the node's id, as `onward status` shows it."""

    def processes_of(self, node: str) -> list[int]:
        """The raylet of a node and all processes under it, by the name of the node."""
        raylet = self.raylets[node.rpartition("-")[2]]
        return [raylet, *descendants(raylet)]

    def kill_node(self, node: str) -> list[int]:
        """Kills the raylet and everything under it, as the loss of a machine would."""
        pids = self.processes_of(node)
        for pid in pids:  # stopped first, so that none can start another one meanwhile
            signal_if_alive(pid, signal.SIGSTOP)
        pids = self.processes_of(node)
        for pid in pids:
            signal_if_alive(pid, signal.SIGKILL)
        return pids

    def kill_raylet(self, node: str) -> list[int]:
        """Kills the raylet alone, and returns the processes that were under it."""
        raylet, *others = self.processes_of(node)
        os.kill(raylet, signal.SIGKILL)
        return others

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(START_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.stdout.close()
            self._folder.cleanup()


def descendants(pid: int) -> list[int]:
    """Processes below one, also below those that have ended meanwhile as far as they are known."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return children + [deeper for child in children for deeper in descendants(child)]


def signal_if_alive(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def main(folder: str, num_others: int) -> None:
    from ray.cluster_utils import Cluster

    from onward.ray.session import health_checks

    head: dict[str, Any] = {
        "num_cpus": 0,
        "include_dashboard": False,
        "temp_dir": f"{folder}/ray",
        "object_store_memory": 100 << 20,
        "_system_config": health_checks(2.0),
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(num_others):
        cluster.add_node(num_cpus=1, object_store_memory=100 << 20, wait=False)
    cluster.wait_for_nodes()
    raylets = {node.node_id[:8]: node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()}
    print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
