"""Cases of one target, until so many have been tried or one is found that is neither taken nor cleanly refused."""

import time
from dataclasses import dataclass
from random import Random

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tests.fuzz.case import Target


@dataclass(slots=True)
class Finding:
    data: bytes
    fault: str


@dataclass(slots=True)
class Outcome:
    num_cases: int = 0
    num_taken: int = 0
    seconds: float = 0.0
    finding: Finding | None = None


def fuzz(target: Target, num_cases: int, seed: int) -> Outcome:
    """In rounds: hypothesis slows down in long ones, because it remembers what it has tried."""
    outcome, chance, began_s = Outcome(), Random(seed), time.perf_counter()
    while outcome.num_cases < num_cases and outcome.finding is None:
        _round(target, min(2000, num_cases - outcome.num_cases), chance.randrange(1 << 62), outcome)
    outcome.seconds = time.perf_counter() - began_s
    return outcome


def _round(target: Target, num_cases: int, seed: int, outcome: Outcome) -> None:
    smallest: list[Finding] = []

    @seeded(seed)
    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        print_blob=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(target.cases)
    def attempt(data: bytes) -> None:
        outcome.num_cases += 1
        try:
            outcome.num_taken += target.check(data)
        except BaseException as fault:
            smallest.append(Finding(data, f"{type(fault).__name__}: {str(fault)[:500]}"))
            raise

    try:
        attempt()
    except BaseException:
        if not smallest:
            raise
        outcome.finding = smallest[-1]
