"""What a line of the catalogue of failures is made of."""

from dataclasses import dataclass

from onward.sim.scenario import FaultSpec, MessageTrigger, RunResult, Scenario, Shape, SimInstanceSpec, SimRequest

START_S = 2.0
"""By then every machine is up; behind a router a little later."""
ROUTED_START_S = 3.0


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A failure that another engine had: the run in which it would show here, or the test that covers it instead."""

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


def scenario(
    name: str,
    shape: Shape,
    specs: list[SimInstanceSpec],
    requests: list[SimRequest],
    faults: list[FaultSpec],
    **rest: object,
) -> Scenario:
    settings: dict[str, object] = {"num_routers": 1 if shape == "cluster" else 0} | rest
    return Scenario(0, shape, specs, requests, faults, name=name, **settings)  # type: ignore[arg-type]


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
