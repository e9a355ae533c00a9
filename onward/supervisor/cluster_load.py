"""The load of each model, from the status that a router reports."""

from collections import defaultdict
from typing import Any

import msgspec

from onward.proto.router import InstanceLoad
from onward.supervisor.scaling_policy import LoadFigures


class _InstanceStatus(msgspec.Struct, frozen=True):
    role: str
    state: str
    model: str
    load: InstanceLoad


class _RouterStatus(msgspec.Struct, frozen=True):
    instances: list[_InstanceStatus]
    waiting: dict[str, int]
    """Requests that wait for an instance, by model."""


def load_by_model(document: Any) -> dict[str, LoadFigures]:
    """Returns the load of each model that has an instance which is ready to take requests. Raises
    `msgspec.ValidationError` for a document that no router writes."""
    status = msgspec.convert(document, _RouterStatus)
    loads: dict[str, list[InstanceLoad]] = defaultdict(list)
    for instance in status.instances:
        if instance.state == "ready" and instance.role != "prefill":
            loads[instance.model].append(instance.load)
    return {model: _sum(of_model, status.waiting.get(model, 0)) for model, of_model in loads.items()}


def _sum(loads: list[InstanceLoad], num_waiting: int) -> LoadFigures:
    num_blocks = sum(load.num_blocks for load in loads)
    num_free = sum(load.free_blocks for load in loads)
    return LoadFigures(
        num_ready=len(loads),
        num_running=sum(load.running for load in loads),
        num_waiting=num_waiting + sum(load.waiting for load in loads),
        max_running=sum(load.max_running for load in loads),
        kv_usage=1 - num_free / num_blocks if num_blocks else 0.0,
    )
