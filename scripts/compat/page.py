"""Writes the tables of `docs/compatibility.md` from the results."""

from pathlib import Path

from .results import Reason, Results, SuiteResult, Target, TargetCounts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
BEGIN, END = "<!-- compatibility -->", "<!-- /compatibility -->"
_COUNTS = "passed | failed | not applicable"
_HEAD = f"| client or suite | version | directly: {_COUNTS} | through a router: {_COUNTS} |"


def table(results: Results) -> str:
    rows = [_HEAD, "|---|---|---|---|---|---|---|---|", *map(_row, results.suites)]
    parts = ["\n".join(rows), f"(Onward {results.onward}, model `{results.model}`)"]
    parts.append("Why checks do not apply:\n\n" + "\n".join(_reasons(results)))
    if failures := [line for one in results.suites for line in _failures(one)]:
        parts.append("What failed:\n\n" + "\n".join(failures))
    return "\n\n".join(parts)


def _row(suite: SuiteResult) -> str:
    cells = [suite.name, f"`{suite.version}`"]
    for target in Target:
        cells += _cells(suite.targets[target])
    return f"| {' | '.join(cells)} |"


def _cells(counts: TargetCounts) -> list[str]:
    return [str(counts.passed), str(len(counts.failed)), str(sum(counts.not_applicable.values()))]


def _reasons(results: Results) -> list[str]:
    lines = []
    for reason in Reason:
        counts = {one.name: one.targets[Target.DIRECT].not_applicable.get(reason, 0) for one in results.suites}
        if found := [f"{name} {number}" for name, number in counts.items() if number]:
            lines.append(f"* {reason.value}: {', '.join(found)}")
    return lines


def _failures(suite: SuiteResult) -> list[str]:
    names = sorted({name for counts in suite.targets.values() for name in counts.failed})
    return [f"* {suite.name}: `{name}`" for name in names]


def write_page(results: Results) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
