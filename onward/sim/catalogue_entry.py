"""What a line of the catalogue of failures is made of."""

from dataclasses import dataclass

from onward.sim.scenario import Ask, Fault, Machine, Moment, Outcome, Scenario, Shape

START_S = 2.0
"""By then every machine is up; behind a router a little later."""
ROUTED_START_S = 3.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A failure that another engine had: the run in which it would show here, or the test that covers it instead."""

    title: str
    scenario: Scenario | None
    covered_by: str
    """A test in which the same is tried without a simulation; the only one, where simulation cannot express it."""
    shows: tuple[str, ...] = ()
    """What must stand in the trace: it really came to that."""
    never: tuple[str, ...] = ()
    """And what must not."""
    at_most: tuple[tuple[str, int], ...] = ()
    """How often something may stand there."""


def shortfall(entry: Entry, outcome: Outcome) -> str | None:
    """In what a run with a trace of all messages is not what its entry says, if in anything."""
    assert entry.scenario is not None, "only what was run can be judged"
    idle = {fault.kind for fault in entry.scenario.faults} - outcome.fired.keys()
    if idle:
        return f"a fault never fired: {', '.join(sorted(idle))}"
    text = "\n".join(outcome.trace)
    for what in entry.shows:
        if what not in text:
            return f"it never came to {what!r}"
    for what, times in [*((what, 0) for what in entry.never), *entry.at_most]:
        if text.count(what) > times:
            return f"{what!r} {text.count(what)} times, and not {times} at most"
    return None


def scenario(
    name: str, shape: Shape, machines: list[Machine], asks: list[Ask], faults: list[Fault], **rest: object
) -> Scenario:
    settings: dict[str, object] = {"num_routers": 1 if shape == "cluster" else 0} | rest
    return Scenario(0, shape, machines, asks, faults, name=name, **settings)  # type: ignore[arg-type]


def burst(count: int, prompt: str, *, at_s: float = START_S, gap_s: float = 0.01, **common: object) -> list[Ask]:
    """Some requests, one soon after the other; none of them ends before its length."""
    settings: dict[str, object] = {"ignore_eos": True, "max_tokens": 24} | common
    return [
        Ask(f"q{index}", round(at_s + index * gap_s, 4), prompt=f"{index} {prompt}", **settings)  # type: ignore[arg-type]
        for index in range(count)
    ]


def when(message: str, kind: str, target: str, *, nth: int = 1, wire: str = "", **rest: float) -> Fault:
    """Something goes wrong when a message of this kind is sent for the n-th time."""
    return Fault(kind, target, moment=Moment(message, nth, wire), **rest)
