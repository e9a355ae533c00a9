"""What a line of the catalogue of failures is made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onward.sim.scenario import FaultSpec, MessageTrigger, RunResult, Scenario, Shape, SimInstanceSpec, SimRequest

START_S = 2.0
"""By then every machine is up; behind a router a little later."""
ROUTED_START_S = 3.0


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A failure that another engine had: the run in which it would show here, or the test that covers it instead."""

    name: str
    title: str
    scenario: Scenario | None
    covered_by: str
    """A test in which the same is tried without a simulation; the only one, where simulation cannot express it."""
    expected_lines: tuple[str, ...] = ()
    """What must stand in the trace: it really came to that."""
    forbidden_lines: tuple[str, ...] = ()
    """And what must not."""
    max_occurrences: tuple[tuple[str, int], ...] = ()
    """How often something may stand there."""


def find_mismatch(entry: CatalogueEntry, outcome: RunResult) -> str | None:
    """In what a run with a trace of all messages is not what its entry says, if in anything."""
    assert entry.scenario is not None, "only what was run can be judged"
    idle = {fault.kind for fault in entry.scenario.faults} - outcome.triggered.keys()
    if idle:
        return f"a fault never fired: {', '.join(sorted(idle))}"
    text = "\n".join(outcome.trace)
    for what in entry.expected_lines:
        if what not in text:
            return f"it never came to {what!r}"
    for what, times in [*((what, 0) for what in entry.forbidden_lines), *entry.max_occurrences]:
        if text.count(what) > times:
            return f"{what!r} {text.count(what)} times, and not {times} at most"
    return None


def entry(
    name: str,
    title: str,
    covered_by: str,
    instances: Sequence[SimInstanceSpec] = (),
    requests: Sequence[SimRequest] = (),
    faults: Sequence[FaultSpec] = (),
    *,
    expects: tuple[str, ...] = (),
    forbids: tuple[str, ...] = (),
    max_occurrences: tuple[tuple[str, int], ...] = (),
    num_routers: int = 0,
    **settings: Any,
) -> CatalogueEntry:
    """Without instances: what simulation cannot express. The shape follows from what there is."""
    has_prefill = any(spec.role == "prefill" for spec in instances)
    shape: Shape = "cluster" if num_routers else "pd" if has_prefill else "engine"
    scenario = Scenario(0, shape, [*instances], [*requests], [*faults], name=name, num_routers=num_routers, **settings)
    return CatalogueEntry(name, title, scenario if instances else None, covered_by, expects, forbids, max_occurrences)


def catalogue(*entries: CatalogueEntry) -> dict[str, CatalogueEntry]:
    return {entry.name: entry for entry in entries}


def burst(count: int, prompt: str, *, at_s: float = START_S, gap_s: float = 0.01, **common: object) -> list[SimRequest]:
    """Some requests, one soon after the other; none of them ends before its length."""
    settings: dict[str, object] = {"ignore_eos": True, "max_tokens": 24} | common
    return [
        SimRequest(f"q{index}", round(at_s + index * gap_s, 4), prompt=f"{index} {prompt}", **settings)  # type: ignore[arg-type]
        for index in range(count)
    ]


def on_message(message: str, kind: str, target: str, *, nth: int = 1, wire: str = "", **rest: float) -> FaultSpec:
    """Something goes wrong when a message of this kind is sent for the n-th time."""
    return FaultSpec(kind, target, trigger=MessageTrigger(message, nth, wire), **rest)
