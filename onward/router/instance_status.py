"""The router's instances and streams as people and scripts are shown them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from onward.proto.router import Registration
from onward.router.instance_registry import InstanceInfo
from onward.router.routed_stream import RoutedStream


def describe_instances(
    replicas: Iterable[InstanceInfo], told: Mapping[str, Registration], routes: Iterable[RoutedStream]
) -> list[dict[str, Any]]:
    streams = Counter(route.stream.instance_id for route in routes if route.stream.is_attempt_running)
    return [
        _describe_instance(replica, told.get(replica.instance_id), streams[replica.instance_id]) for replica in replicas
    ]


def _describe_instance(replica: InstanceInfo, told: Registration | None, num_streams: int) -> dict[str, Any]:
    return {
        "id": replica.instance_id,
        "role": replica.role,
        "state": replica.state.value,
        "url": replica.url,
        "incarnation": replica.instance_id,
        "load": replica.load,
        "blocks": {"free": replica.load.free_blocks, "total": replica.load.num_blocks},
        "streams": num_streams,
        "pids": told.pids_by_role if told else {},
        "oom_kills": told.oom_kills if told else {},
    }
