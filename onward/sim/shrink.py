"""Makes a scenario that violates an invariant smaller: takes out what the violation does not need, and runs it again.

Faults go first, then requests, then machines; then what is left becomes as plain as it can be. What counts as the same
violation is the caller's to say. The number of runs and the time are bounded, so the result is small, not the smallest.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from onward.sim.batch import violation_signature
from onward.sim.scenario import FaultSpec, RunResult, Scenario, SimInstanceSpec, SimRequest
from onward.sim.simulation import run_scenario

MAX_RUNS = 600
MAX_S = 90.0
EARLIER_S = 0.25
MAX_RESEEDS = 6
SHORT_PROMPTS = ("a", "the sea")
T = TypeVar("T")


class ShrinkResult(msgspec.Struct, frozen=True):
    scenario: Scenario
    outcome: RunResult
    num_runs: int
    seconds: float
    was_cut_short: bool
    """By the bounds, so that more may be possible."""


class _SearchLimitReached(Exception):
    pass


def shrink(
    outcome: RunResult,
    *,
    max_runs: int = MAX_RUNS,
    max_s: float = MAX_S,
    on_run: Callable[[int, Scenario], None] = lambda num_runs, smallest: None,
    clock: Callable[[], float] = time.monotonic,
) -> ShrinkResult:
    """`outcome` is of the scenario as it was found."""
    search = _ShrinkSearch(outcome, max_runs, clock() + max_s, on_run, clock)
    began_s, was_cut_short = clock(), False
    try:
        search.shrink_fully()
    except _SearchLimitReached:
        was_cut_short = True
    return ShrinkResult(search.best.scenario, search.best, search.num_runs, clock() - began_s, was_cut_short)


class _ShrinkSearch:
    def __init__(
        self,
        outcome: RunResult,
        max_runs: int,
        end_s: float,
        on_run: Callable[[int, Scenario], None],
        clock: Callable[[], float],
    ) -> None:
        assert outcome.violation is not None, "there is nothing to look for"
        self.best = outcome
        self.num_runs = 0
        self._num_lucks = 1
        self._wanted = violation_signature(outcome.violation)
        self._max_runs, self._end_s = max_runs, end_s
        self._on_run, self._clock = on_run, clock

    @property
    def _scenario(self) -> Scenario:
        return self.best.scenario

    def shrink_fully(self) -> None:
        """At last with more patience, where it has become small and a run is cheap."""
        for self._num_lucks in (1, MAX_RESEEDS):
            before = None
            while before != self._scenario:
                before = self._scenario
                self._drop_parts()
                self._simplify()

    def _drop_parts(self) -> None:
        self._remove_items(self._scenario.faults, lambda faults: {"faults": faults})
        self._remove_items(self._scenario.requests, lambda asks: {"requests": asks})
        self._remove_items(self._scenario.instances, self._with_machines)

    def _with_machines(self, machines: list[SimInstanceSpec]) -> dict[str, Any]:
        """What concerns a machine goes with it."""
        gone = {one.name for one in self._scenario.instances} - {one.name for one in machines}
        kept = [fault for fault in self._scenario.faults if fault.target not in gone]
        return {"instances": machines, "faults": kept}

    def _remove_items(self, items: Sequence[T], changes: Callable[[list[T]], dict[str, Any]]) -> None:
        """First all of them, then halves, quarters, down to one by one."""
        kept, size = list(items), len(items)
        while size >= 1:
            at = 0
            while at < len(kept):
                fewer = kept[:at] + kept[at + size :]
                if self._still_violates(**changes(fewer)):
                    kept = fewer
                else:
                    at += size
            size //= 2

    def _simplify(self) -> None:
        for change in _plainer_wholes(self._scenario):
            self._still_violates(**change)
        for name, plainer in (
            ("requests", _plainer_asks),
            ("faults", _plainer_faults),
            ("instances", _plainer_machines),
        ):
            for index in range(len(getattr(self._scenario, name))):
                self._make_one_plain(name, index, plainer)

    def _make_one_plain(self, name: str, index: int, plainer: Callable[[Any], Iterator[Any]]) -> None:
        """Each step starts from the plainest that has been found, until none is left that helps."""
        helps = True
        while helps:
            items = list(getattr(self._scenario, name))
            helps = any(
                self._still_violates(**{name: [*items[:index], one, *items[index + 1 :]]})
                for one in plainer(items[index])
            )

    def _still_violates(self, **changes: Any) -> bool:
        """Whether the violation is still there; then this is the best so far."""
        candidate = msgspec.structs.replace(self._scenario, **changes)
        if candidate == self._scenario or not _is_possible(candidate):
            return False
        for variant in _variants(candidate, self._num_lucks):
            if self.num_runs >= self._max_runs or self._clock() > self._end_s:
                raise _SearchLimitReached
            self.num_runs += 1
            self._on_run(self.num_runs, self._scenario)
            outcome = run_scenario(variant)
            if outcome.violation is not None and violation_signature(outcome.violation) == self._wanted:
                self.best = outcome
                return True
        return False


def _variants(scenario: Scenario, num_lucks: int) -> Iterator[Scenario]:
    """What is taken out changes what befalls the rest, and when: all goes faster. So it may need other luck, or faults
    that come earlier."""
    yield scenario
    for luck in range(1, 1 + num_lucks):
        yield msgspec.structs.replace(scenario, seed=scenario.seed + luck)
    if scenario.faults:
        faults = [
            msgspec.structs.replace(fault, at_s=round(max(0.0, fault.at_s - EARLIER_S), 4))
            if fault.trigger is None
            else fault
            for fault in scenario.faults
        ]
        yield msgspec.structs.replace(scenario, faults=faults)


def _is_possible(scenario: Scenario) -> bool:
    return bool(scenario.requests) and any(machine.role != "prefill" for machine in scenario.instances)


def _plainer_wholes(scenario: Scenario) -> Iterator[dict[str, Any]]:
    yield {"requests": [_with_defaults(ask, _ASK_FIXED) for ask in scenario.requests]}
    yield {"instances": [_with_defaults(machine, _MACHINE_FIXED) for machine in scenario.instances]}
    if scenario.num_routers > 1:
        others = [fault for fault in scenario.faults if not fault.target.startswith("r") or fault.target == "r0"]
        yield {"num_routers": 1, "faults": others}
    for field in ("policy", "preempt_retry_count", "preempt_retry_exclude_decode", "retry_budget", "delay_s"):
        yield {field: _default(Scenario, field)}


_ASK_FIXED = frozenset({"name", "at_s", "prompt", "prompt_token_ids", "max_tokens", "seed"})
_MACHINE_FIXED = frozenset({"name", "role"})


def _plainer_asks(ask: SimRequest) -> Iterator[SimRequest]:
    yield _with_defaults(ask, _ASK_FIXED)
    yield from _plainer_fields(ask, _ASK_FIXED)
    if len(ask.disconnect_at_s) > 1:
        yield from (msgspec.structs.replace(ask, disconnect_at_s=[at_s]) for at_s in ask.disconnect_at_s)
    if ask.turns > 2:
        yield msgspec.structs.replace(ask, turns=ask.turns - 1)
    for prompt in (*SHORT_PROMPTS, ask.prompt[: len(ask.prompt) // 2].strip()):
        if prompt and len(prompt) < len(ask.prompt):
            yield msgspec.structs.replace(ask, prompt=prompt)
    for max_tokens in (1, 2, 4, 8, ask.max_tokens // 2, ask.max_tokens - 1):
        if 0 < max_tokens < ask.max_tokens:
            yield msgspec.structs.replace(ask, max_tokens=max_tokens, min_tokens=min(ask.min_tokens, max_tokens))
    if ask.seed not in (None, 1):
        yield msgspec.structs.replace(ask, seed=1)
    if round(ask.at_s, 1) != ask.at_s:
        yield msgspec.structs.replace(ask, at_s=round(ask.at_s, 1))


def _plainer_faults(fault: FaultSpec) -> Iterator[FaultSpec]:
    if fault.rate != 1.0:
        yield msgspec.structs.replace(fault, rate=1.0)
    for name in ("at_s", "duration_s"):
        rough = round(getattr(fault, name), 1)
        if rough != getattr(fault, name):
            yield msgspec.structs.replace(fault, **{name: rough})
    if fault.duration_s > 0.2:
        yield msgspec.structs.replace(fault, duration_s=round(fault.duration_s / 2, 1))


def _plainer_machines(machine: SimInstanceSpec) -> Iterator[SimInstanceSpec]:
    yield _with_defaults(machine, _MACHINE_FIXED)
    yield from _plainer_fields(machine, _MACHINE_FIXED)


def _with_defaults(item: Any, fixed: frozenset[str]) -> Any:
    changes = {name: _default(type(item), name) for name in item.__struct_fields__ if name not in fixed}
    return msgspec.structs.replace(item, **changes)


def _plainer_fields(item: Any, fixed: frozenset[str]) -> Iterator[Any]:
    for name in item.__struct_fields__:
        if name not in fixed and getattr(item, name) != _default(type(item), name):
            yield msgspec.structs.replace(item, **{name: _default(type(item), name)})


def _default(of: type, name: str) -> Any:
    field = next(one for one in msgspec.structs.fields(of) if one.name == name)
    return field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
