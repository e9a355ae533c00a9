"""What one tenant feels of another, as `make bench-isolation` reckons it."""

import itertools

import msgspec
import pytest

from benchmarks.isolation.hostile_tenant import HUGE_TEXT, KINDS, bodies
from benchmarks.isolation.tenant_figures import TenantRound, missed, table
from onward.bench.report import Percentiles

CALM = Percentiles(0.02, 0.05, 0.02, 0.06)


def round_of(kind: str = "texts", p99_s: float = 0.05, most_mb: float = 150.0) -> TenantRound:
    attacked = Percentiles(0.03, p99_s, 0.03, p99_s)
    return TenantRound(kind, CALM, attacked, 200, 100.0, most_mb, {"400": 61, "429": 12345})


def test_bars_are_missed_by_time_and_by_memory() -> None:
    assert missed([round_of(p99_s=0.1, most_mb=612.0)]) == []
    slow, large = missed([round_of(p99_s=0.101), round_of("stored", most_mb=613.0)])
    assert "texts: p99" in slow
    assert "stored: an api process grows by 513 MB" in large


@pytest.mark.parametrize("kind", KINDS)
def test_figures_fit_into_80_columns_whatever_they_are(kind: str) -> None:
    lines = table([round_of(kind), round_of(kind, p99_s=45.7, most_mb=6800.0)]).splitlines()
    assert max(map(len, lines)) <= 80
    assert "914.00" in lines[2] and "50 -> 45700" in lines[2] and "100 -> 6800" in lines[2]


@pytest.mark.parametrize("kind", KINDS)
def test_an_attack_never_runs_out_of_requests(kind: str) -> None:
    asked = list(itertools.islice(bodies(kind, "model"), 3))
    assert len({path for path, _ in asked}) == 1
    if kind == "texts":
        assert len(asked[0][1]["prompt"]) == HUGE_TEXT
    if kind in ("grammars", "resumes", "stored"):
        assert len({msgspec.json.encode(body) for _, body in asked}) == 3, "what was answered before is remembered"
