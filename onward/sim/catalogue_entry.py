"""Entries of the catalogue of failures, and functions that build them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onward.sim.scenario import FaultSpec, MessageTrigger, RunResult, Scenario, Shape, SimInstanceSpec, SimRequest

START_S = 2.0
"""When the first request comes: every instance is up by then. With a router it is `ROUTED_START_S`."""
ROUTED_START_S = 3.0


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A failure that another engine had: the scenario in which it would show here, and a test that covers it."""

    name: str
    title: str
    scenario: Scenario | None
    covered_by: str
    """A test of the same failure without a simulation. It is the only test if a simulation cannot express the
    failure."""
    expected_lines: tuple[str, ...] = ()
    """Texts that the trace must contain, which shows that the situation has occurred."""
    forbidden_lines: tuple[str, ...] = ()
    """Texts that the trace must not contain."""
    max_occurrences: tuple[tuple[str, int], ...] = ()
    """Texts, each with the number of times that the trace may contain it."""


def find_mismatch(entry: CatalogueEntry, outcome: RunResult) -> str | None:
    """Returns how a run differs from what its entry expects, or None. The run must have a trace of all messages."""
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
    """Returns an entry. Without instances it has no scenario, because a simulation cannot express the failure. The
    shape follows from the routers and the roles of the instances."""
    has_prefill = any(spec.role == "prefill" for spec in instances)
    shape: Shape = "cluster" if num_routers else "pd" if has_prefill else "engine"
    scenario = Scenario(0, shape, [*instances], [*requests], [*faults], name=name, num_routers=num_routers, **settings)
    return CatalogueEntry(name, title, scenario if instances else None, covered_by, expects, forbids, max_occurrences)


def catalogue(*entries: CatalogueEntry) -> dict[str, CatalogueEntry]:
    return {entry.name: entry for entry in entries}


def burst(count: int, prompt: str, *, at_s: float = START_S, gap_s: float = 0.01, **common: object) -> list[SimRequest]:
    """Returns requests that follow each other closely. By default they ignore the end token, so that each has
    `max_tokens` tokens."""
    settings: dict[str, object] = {"ignore_eos": True, "max_tokens": 24} | common
    return [
        SimRequest(f"q{index}", round(at_s + index * gap_s, 4), prompt=f"{index} {prompt}", **settings)  # type: ignore[arg-type]
        for index in range(count)
    ]


def on_message(message: str, kind: str, target: str, *, nth: int = 1, wire: str = "", **rest: float) -> FaultSpec:
    """Returns a fault that begins when the n-th message of a type is sent."""
    return FaultSpec(kind, target, trigger=MessageTrigger(message, nth, wire), **rest)
