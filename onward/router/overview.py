"""The router's instances and streams as people and scripts are shown them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from onward.proto.router import Registration
from onward.router.replicas import Replica
from onward.router.route import Route


def instances_shown(
    replicas: Iterable[Replica], told: Mapping[str, Registration], routes: Iterable[Route]
) -> list[dict[str, Any]]:
    streams = Counter(route.stream.instance for route in routes if route.stream.is_under_way)
    return [_shown(replica, told.get(replica.instance), streams[replica.instance]) for replica in replicas]


def _shown(replica: Replica, told: Registration | None, num_streams: int) -> dict[str, Any]:
    return {
        "id": replica.instance,
        "role": replica.role,
        "state": replica.state.value,
        "url": replica.url,
        "incarnation": replica.instance,
        "load": replica.load,
        "blocks": {"free": replica.load.free_blocks, "total": replica.load.num_blocks},
        "streams": num_streams,
        "pids": told.pids if told else {},
        "oom_kills": told.oom_kills if told else {},
    }
