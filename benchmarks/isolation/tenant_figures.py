"""What one tenant feels of another in `make bench-isolation`: response times without and with the attack, and memory."""

from collections.abc import Sequence

import msgspec

from onward.bench.report import Percentiles

MOST_P99_RATIO = 2.0
"""Largest ratio of the p99 of the other tenant's small requests with and without the attack."""
MOST_API_GROWTH_MB = 512.0
"""Largest growth of each api process beyond what it had before the attack."""


class TenantRound(msgspec.Struct, frozen=True):
    kind: str
    """The kind of attack."""
    calm: Percentiles
    """Seconds that the other tenant's requests took without it."""
    attacked: Percentiles
    num_requests: int
    """Requests of the other tenant, during the attack."""
    api_before_mb: float
    api_most_mb: float
    """During the attack, of the largest api process."""
    statuses: dict[str, int]
    """How the attacking requests were answered."""

    @property
    def ratio(self) -> float:
        return self.attacked.p99 / self.calm.p99

    @property
    def growth_mb(self) -> float:
        return self.api_most_mb - self.api_before_mb


def table(rounds: Sequence[TenantRound]) -> str:
    """Within 80 columns."""
    head = f"{'attack':<10} {'p50 ms':>13} {'p99 ms':>15} {'ratio':>6} {'api MB':>12}  answered"
    return "\n".join([head, *map(_row, rounds)]) + "\n"


def _row(one: TenantRound) -> str:
    p50 = f"{one.calm.p50 * 1e3:.0f} -> {one.attacked.p50 * 1e3:.0f}"
    p99 = f"{one.calm.p99 * 1e3:.0f} -> {one.attacked.p99 * 1e3:.0f}"
    memory = f"{one.api_before_mb:.0f} -> {one.api_most_mb:.0f}"
    answered = " ".join(f"{status}:{count}" for status, count in one.statuses.items())
    return f"{one.kind:<10} {p50:>13} {p99:>15} {one.ratio:>6.2f} {memory:>12}  {answered}"[:80]


def missed(rounds: Sequence[TenantRound]) -> list[str]:
    """Bars that were missed."""
    slow = [one for one in rounds if one.ratio > MOST_P99_RATIO]
    large = [one for one in rounds if one.growth_mb > MOST_API_GROWTH_MB]
    return [
        *(f"{one.kind}: p99 of another tenant is {one.ratio:.2f} times as long, not {MOST_P99_RATIO}" for one in slow),
        *(f"{one.kind}: an api process grows by {one.growth_mb:.0f} MB" for one in large),
    ]
