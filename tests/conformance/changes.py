"""Changes to a step's events, made on the worker's side of the wire."""

from collections.abc import Callable

from onward.engine.request import Request
from onward.proto.step import SlotEvent
from tests.conformance.wires import Change, WiredHarness


def request_of(harness: WiredHarness, request_id: str) -> Request:
    return harness.core._live[request_id]


def replace(harness: WiredHarness, request_id: str, make: Callable[[SlotEvent], SlotEvent]) -> Change:
    """Only this request's event is another one."""
    epoch = request_of(harness, request_id).slot_epoch
    return lambda events: [make(event) if event.slot_epoch == epoch else event for event in events]


def drop(harness: WiredHarness, request_id: str) -> Change:
    """This request's slot stays silent."""
    epoch = request_of(harness, request_id).slot_epoch
    return lambda events: [event for event in events if event.slot_epoch != epoch]


def until_preempting(harness: WiredHarness, request_id: str) -> None:
    """Goes on until the plan that preempts this request is in flight, and is the oldest one."""
    epoch = 0
    for _ in range(1000):
        if harness.plans and epoch in {command.slot_epoch for command in harness.plans[0].preempt}:
            return
        plan = harness.plan() if epoch == 0 else None
        request = harness.core._live.get(request_id)
        if plan and request is not None and request in harness.core.scheduler.preempting:
            epoch = request.slot_epoch
        elif harness.plans:
            harness.answer()
    raise AssertionError(f"{request_id} is never preempted")
