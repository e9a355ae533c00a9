"""Makes a scenario that violates an invariant smaller: removes what the violation does not need, and runs it again.

Faults are removed first, then requests, then instances; then the remaining items are simplified. Two violations count
as the same if their signatures are equal. The number of runs and the time are bounded, so the result is small but not
always the smallest.
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
    """The search has reached a bound, so a smaller scenario may be possible."""


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
    """Returns the smallest scenario found. `outcome` is the result of the original scenario."""
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
        self._num_reseeds = 1
        self._signature = violation_signature(outcome.violation)
        self._max_runs, self._end_s = max_runs, end_s
        self._on_run, self._clock = on_run, clock

    @property
    def _scenario(self) -> Scenario:
        return self.best.scenario

    def shrink_fully(self) -> None:
        """Shrinks until nothing more can be removed. The second pass tries more seeds, because the scenario is small by
        then and a run is cheap."""
        for self._num_reseeds in (1, MAX_RESEEDS):
            before = None
            while before != self._scenario:
                before = self._scenario
                self._drop_parts()
                self._simplify()

    def _drop_parts(self) -> None:
        self._remove_items(self._scenario.faults, lambda faults: {"faults": faults})
        self._remove_items(self._scenario.requests, lambda requests: {"requests": requests})
        self._remove_items(self._scenario.instances, self._with_specs)

    def _with_specs(self, specs: list[SimInstanceSpec]) -> dict[str, Any]:
        """Returns the changes that remove instances, together with the faults that target them."""
        removed = {item.name for item in self._scenario.instances} - {item.name for item in specs}
        kept = [fault for fault in self._scenario.faults if fault.target not in removed]
        return {"instances": specs, "faults": kept}

    def _remove_items(self, items: Sequence[T], changes: Callable[[list[T]], dict[str, Any]]) -> None:
        """Removes items that the violation does not need: first all of them, then halves, quarters, down to single
        ones."""
        kept, size = list(items), len(items)
        while size >= 1:
            start = 0
            while start < len(kept):
                fewer = kept[:start] + kept[start + size :]
                if self._still_violates(**changes(fewer)):
                    kept = fewer
                else:
                    start += size
            size //= 2

    def _simplify(self) -> None:
        for change in _simpler_scenarios(self._scenario):
            self._still_violates(**change)
        for name, simpler in (
            ("requests", _simpler_requests),
            ("faults", _simpler_faults),
            ("instances", _simpler_specs),
        ):
            for index in range(len(getattr(self._scenario, name))):
                self._simplify_item(name, index, simpler)

    def _simplify_item(self, name: str, index: int, simpler: Callable[[Any], Iterator[Any]]) -> None:
        """Replaces an item by simpler ones. Each step starts from the simplest item found, until no simpler one keeps
        the violation."""
        found = True
        while found:
            items = list(getattr(self._scenario, name))
            found = any(
                self._still_violates(**{name: [*items[:index], item, *items[index + 1 :]]})
                for item in simpler(items[index])
            )

    def _still_violates(self, **changes: Any) -> bool:
        """Runs the changed scenario, then variants with other seeds and earlier faults. Returns whether one has the
        same violation; that one becomes the best. An unchanged or impossible scenario is not run. Raises
        `_SearchLimitReached` when runs or time are used up."""
        candidate = msgspec.structs.replace(self._scenario, **changes)
        if candidate == self._scenario or not _is_possible(candidate):
            return False
        for variant in _variants(candidate, self._num_reseeds):
            if self.num_runs >= self._max_runs or self._clock() > self._end_s:
                raise _SearchLimitReached
            self.num_runs += 1
            self._on_run(self.num_runs, self._scenario)
            outcome = run_scenario(variant)
            if outcome.violation is not None and violation_signature(outcome.violation) == self._signature:
                self.best = outcome
                return True
        return False


def _variants(scenario: Scenario, num_reseeds: int) -> Iterator[Scenario]:
    """Yields the scenario itself, with other seeds, and with earlier faults. Removing a part changes what happens to
    the rest, and makes it happen earlier. So the violation may need another seed or earlier faults."""
    yield scenario
    for reseed in range(1, 1 + num_reseeds):
        yield msgspec.structs.replace(scenario, seed=scenario.seed + reseed)
    if scenario.faults:
        faults = [
            msgspec.structs.replace(fault, at_s=round(max(0.0, fault.at_s - EARLIER_S), 4))
            if fault.trigger is None
            else fault
            for fault in scenario.faults
        ]
        yield msgspec.structs.replace(scenario, faults=faults)


def _is_possible(scenario: Scenario) -> bool:
    return bool(scenario.requests) and any(spec.role != "prefill" for spec in scenario.instances)


def _simpler_scenarios(scenario: Scenario) -> Iterator[dict[str, Any]]:
    yield {"requests": [_with_defaults(request, _REQUEST_FIXED) for request in scenario.requests]}
    yield {"instances": [_with_defaults(spec, _SPEC_FIXED) for spec in scenario.instances]}
    if scenario.num_routers > 1:
        faults = [fault for fault in scenario.faults if not fault.target.startswith("r") or fault.target == "r0"]
        yield {"num_routers": 1, "faults": faults}
    for field in ("policy", "preempt_retry_count", "preempt_retry_exclude_decode", "retry_budget", "delay_s"):
        yield {field: _default(Scenario, field)}


_REQUEST_FIXED = frozenset({"name", "at_s", "prompt", "prompt_token_ids", "max_tokens", "seed"})
_SPEC_FIXED = frozenset({"name", "role"})


def _simpler_requests(request: SimRequest) -> Iterator[SimRequest]:
    yield _with_defaults(request, _REQUEST_FIXED)
    yield from _simpler_fields(request, _REQUEST_FIXED)
    if len(request.disconnect_at_s) > 1:
        yield from (msgspec.structs.replace(request, disconnect_at_s=[at_s]) for at_s in request.disconnect_at_s)
    if request.turns > 2:
        yield msgspec.structs.replace(request, turns=request.turns - 1)
    for prompt in (*SHORT_PROMPTS, request.prompt[: len(request.prompt) // 2].strip()):
        if prompt and len(prompt) < len(request.prompt):
            yield msgspec.structs.replace(request, prompt=prompt)
    for max_tokens in (1, 2, 4, 8, request.max_tokens // 2, request.max_tokens - 1):
        if 0 < max_tokens < request.max_tokens:
            yield msgspec.structs.replace(
                request, max_tokens=max_tokens, min_tokens=min(request.min_tokens, max_tokens)
            )
    if request.seed not in (None, 1):
        yield msgspec.structs.replace(request, seed=1)
    if round(request.at_s, 1) != request.at_s:
        yield msgspec.structs.replace(request, at_s=round(request.at_s, 1))


def _simpler_faults(fault: FaultSpec) -> Iterator[FaultSpec]:
    if fault.rate != 1.0:
        yield msgspec.structs.replace(fault, rate=1.0)
    for name in ("at_s", "duration_s"):
        rounded = round(getattr(fault, name), 1)
        if rounded != getattr(fault, name):
            yield msgspec.structs.replace(fault, **{name: rounded})
    if fault.duration_s > 0.2:
        yield msgspec.structs.replace(fault, duration_s=round(fault.duration_s / 2, 1))


def _simpler_specs(spec: SimInstanceSpec) -> Iterator[SimInstanceSpec]:
    yield _with_defaults(spec, _SPEC_FIXED)
    yield from _simpler_fields(spec, _SPEC_FIXED)


def _with_defaults(item: Any, fixed: frozenset[str]) -> Any:
    changes = {name: _default(type(item), name) for name in item.__struct_fields__ if name not in fixed}
    return msgspec.structs.replace(item, **changes)


def _simpler_fields(item: Any, fixed: frozenset[str]) -> Iterator[Any]:
    for name in item.__struct_fields__:
        if name not in fixed and getattr(item, name) != _default(type(item), name):
            yield msgspec.structs.replace(item, **{name: _default(type(item), name)})


def _default(struct_type: type, name: str) -> Any:
    field = next(item for item in msgspec.structs.fields(struct_type) if item.name == name)
    return field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
