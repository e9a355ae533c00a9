"""The router's instances and streams as people and scripts are shown them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from onward.proto.router import Registration
from onward.router.instance_registry import InstanceInfo
from onward.router.stream_routing_state import StreamRoutingState


def describe_instances(
    instances: Iterable[InstanceInfo],
    registrations: Mapping[str, Registration],
    routings: Iterable[StreamRoutingState],
) -> list[dict[str, Any]]:
    streams = Counter(routing.stream.instance_id for routing in routings if routing.stream.is_attempt_running)
    return [
        _describe_instance(instance, registrations.get(instance.instance_id), streams[instance.instance_id])
        for instance in instances
    ]


def _describe_instance(instance: InstanceInfo, registration: Registration | None, num_streams: int) -> dict[str, Any]:
    return {
        "id": instance.instance_id,
        "name": registration.name if registration else "",
        "node": registration.node if registration else "",
        "role": instance.role,
        "model": instance.model,
        "model_aliases": instance.model_aliases,
        "state": instance.state.value,
        "url": instance.url,
        "incarnation": instance.instance_id,
        "load": instance.load,
        "blocks": {"free": instance.load.free_blocks, "total": instance.load.num_blocks},
        "streams": num_streams,
        "pids": registration.pids_by_role if registration else {},
        "oom_kills": registration.oom_kills if registration else {},
    }
