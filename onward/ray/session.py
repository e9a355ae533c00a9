"""A connection to Ray: to a cluster that runs, or to a new one on this machine that ends with this process.

The environment has Ray's settings already (`config.set_ray_variables`), because Ray reads them when it is imported.
"""

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import ray

from onward.errors import StartupError

LOCAL = "local"
"""The address of a new Ray cluster on this machine."""
HEALTH_CHECKS = 3
"""Failed health checks in a row after which Ray gives a node up."""


@contextlib.contextmanager
def ray_session(address: str, node_timeout_s: float) -> Iterator[None]:
    """Connects to Ray. A new cluster gives nodes up that have been silent for `node_timeout_s`, and keeps its files in a
    folder that is removed at the end. Raises `StartupError` if there is no Ray cluster at `address`."""
    if address == LOCAL:
        with tempfile.TemporaryDirectory(prefix="onward-ray-", ignore_cleanup_errors=True) as folder:
            options = {"_temp_dir": folder, "include_dashboard": False}
            with _connected("local", options | {"_system_config": health_checks(node_timeout_s)}):
                yield
    else:
        with _connected(address, {}):
            yield


def health_checks(node_timeout_s: float) -> dict[str, int]:
    """Returns Ray's settings with which a lost node is noticed after about this time."""
    period_ms = max(1, round(1000 * node_timeout_s / (HEALTH_CHECKS + 1)))
    return {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": period_ms,
        "health_check_timeout_ms": period_ms,
        "health_check_failure_threshold": HEALTH_CHECKS,
    }


@contextlib.contextmanager
def _connected(address: str, options: dict) -> Iterator[None]:
    try:
        ray.init(address, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError) as fault:
        first_line = str(fault).strip().partition("\n")[0]
        raise StartupError(f"--ray {address}: {first_line or type(fault).__name__}") from fault
    try:
        yield
    finally:
        ray.shutdown()


def nodes_elsewhere() -> list[str]:
    """Returns the addresses of Ray's nodes on other machines."""
    own = ray.util.get_node_ip_address()
    return sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]} - {own})


def num_cpus() -> int:
    """Returns the number of cores that Ray has for tasks, on all nodes."""
    return int(ray.cluster_resources().get("CPU", 0))


@dataclass(frozen=True, slots=True)
class DriverNode:
    """The Ray node of this process."""

    node_id: str
    address: str


def driver_node() -> DriverNode:
    return DriverNode(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())
