"""Formats simulated runs: a trace with colours, and the sums of a batch as tables, Markdown or JSON.

The functions are pure: they take results and totals, and print nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from onward.sim.batch import FindingGroup, RunTotals, planned_faults, sum_totals, triggered_faults
from onward.sim.fault_kinds import FAULT_KINDS
from onward.sim.scenario import RunResult, Scenario, Shape, Violation

INVARIANTS = {
    0: "The code under test raises nothing, and logs no error of its own.",
    1: "Every accepted request ends exactly once, with one reason.",
    2: "What the client got equals what it would have got without faults.",
    3: "No token is delivered twice, none is skipped.",
    4: "At idle nothing is held: blocks, leases, fences, slots, requests, tasks.",
    5: "No block is written by anyone but its owner or lease holder of the current epoch.",
    6: "If any request can run, some token appears within a bounded time.",
    7: "The oldest request of the highest priority never loses its blocks to another.",
    8: "No caller sees, continues or ends a request or response of another caller.",
    9: "No waiting request is overtaken by more than a few later ones of its priority.",
    10: "No request is preempted unless that makes enough room for a request before it.",
}
MIN_PLANNED = 30
"""A kind that was planned so often and never took effect is probably broken. Fewer plans may be bad luck: for example,
`refuse` needs a client that connects."""
DISTRIBUTIONS = {
    "requests": "requests",
    "tokens": "delivered tokens",
    "faults": "faults that struck",
    "kinds": "kinds of them",
    "hits": "messages and processes hit",
}
PERCENTS = (10, 50, 90)
Rows = tuple[list[str], list[list[str]]]
"""A table as its titles and its rows."""

# One run.

_STYLES = (
    (re.compile(r"VIOLATION"), "bold red"),
    (re.compile(rf"(?:{'|'.join(FAULT_KINDS)})\b.* for [\d.]+ s$"), "bold yellow"),
    (re.compile(r"\S+ (?:dies|is killed for silence|is renewed: .*)$"), "magenta"),
    (re.compile(r"\S+ ends: complete"), "green"),
    (re.compile(r"\S+ ends: "), "cyan"),
    (re.compile(r"\S+ (?:is cut off|was given up|hears nothing|loses its|goes away|is aborted)"), "yellow"),
    (re.compile(r".*  lost$"), "red dim"),
)


def styled(line: str) -> Text:
    """Returns a line of a trace with colours. Messages are dim."""
    index, what = line[:9], line[9:].lstrip()
    style = next((style for pattern, style in _STYLES if pattern.match(what)), "dim")
    return Text.assemble((index, "dim"), "  ", (what, style))


def summary_of(outcome: RunResult) -> list[str]:
    triggered = triggered_faults(outcome)
    return [
        f"seed {outcome.scenario.seed}, {described(outcome.scenario)}",
        f"requests  {outcome.num_requests}: {_counts(outcome.end_reasons)}",
        f"tokens    {outcome.num_tokens} delivered and compared",
        f"faults    {_counts(triggered) or 'none fired'}",
        f"errors    {outcome.num_errors} that clients saw and recovered from; {outcome.num_resumes} streams resumed",
        f"time      {outcome.virtual_s:.3f} virtual seconds",
        f"digest    {outcome.digest}",
    ]


def described(scenario: Scenario) -> str:
    instances = ", ".join(f"{totals.name} ({totals.role})" for totals in scenario.instances)
    routers = f", {_number(scenario.num_routers, 'router')}" if scenario.num_routers else ""
    what = f"{_number(len(scenario.requests), 'request')} and {_number(planned_faults(scenario).total(), 'fault')}"
    return f"shape {scenario.shape}: {instances}{routers}; {what}"


def describe_violation(violation: Violation) -> str:
    sentence = INVARIANTS.get(violation.invariant, "")
    return (
        f"invariant {violation.invariant} is violated at {violation.at_s:.4f} s: {sentence}\n  {violation.description}"
    )


def _number(count: int, noun: str, nouns: str = "") -> str:
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


# A batch.


class BatchRates(msgspec.Struct, frozen=True):
    """Real time and size of a batch, for its rates."""

    wall_s: float
    num_processes: int
    num_runs: int
    num_tokens: int


def percentile(histogram: Mapping[int, int], percent: float) -> int:
    """Returns the smallest value that at least `percent` per cent of the runs do not exceed."""
    needed, seen = sum(histogram.values()) * percent / 100, 0
    for value in sorted(histogram):
        seen += histogram[value]
        if seen >= needed:
            return value
    return 0


def total_of(histogram: Mapping[int, int]) -> int:
    return sum(value * count for value, count in histogram.items())


def never_triggered(tally: RunTotals) -> list[str]:
    """Returns the kinds that are probably broken: planned often, and never with an effect."""
    return [kind for kind, count in tally.planned.items() if count >= MIN_PLANNED and not tally.triggered.get(kind)]


def shape_rows(tallies: Mapping[Shape, RunTotals]) -> Rows:
    titles = ["shape", "runs", "virtual hours", "requests", "tokens checked", "faults", "resumes", "runs/s", "tokens/s"]
    named: list[tuple[str, RunTotals]] = [*tallies.items()]
    if len(named) > 1:
        named.append(("all", sum_totals(list(tallies.values()))))
    return titles, [[name, *_shape_row(tally)] for name, tally in named]


def _shape_row(tally: RunTotals) -> list[str]:
    tokens, cpu_s = total_of(tally.tokens), tally.cpu_s or 1.0
    return [
        f"{tally.num_runs:,}",
        f"{tally.virtual_s / 3600:,.1f}",
        f"{total_of(tally.requests):,}",
        f"{tokens:,}",
        f"{total_of(tally.faults):,}",
        f"{tally.num_resumes:,}",
        f"{tally.num_runs / cpu_s:,.1f}",
        f"{tokens / cpu_s:,.0f}",
    ]


def distribution_rows(tallies: Mapping[Shape, RunTotals]) -> Rows:
    """Returns p10, median and p90 of each figure per run."""
    titles = ["per run", *tallies]
    rows = [
        [
            name,
            *(
                " / ".join(str(percentile(getattr(totals, field), index)) for index in PERCENTS)
                for totals in tallies.values()
            ),
        ]
        for field, name in DISTRIBUTIONS.items()
    ]
    return titles, rows


def fault_rows(tallies: Mapping[Shape, RunTotals]) -> Rows:
    total = sum_totals(list(tallies.values()))
    shown = [kind for kind in FAULT_KINDS if kind in total.planned or kind in total.triggered]
    rows = [
        [kind, FAULT_KINDS[kind].help, f"{total.planned.get(kind, 0):,}", f"{total.triggered.get(kind, 0):,}"]
        for kind in shown
    ]
    return ["fault", "what happens", "drawn", "struck"], rows


def end_rows(tallies: Mapping[Shape, RunTotals]) -> Rows:
    ends = sum_totals(list(tallies.values())).end_reasons
    return ["how requests ended", "requests"], [[name, f"{count:,}"] for name, count in sorted(ends.items())]


def table_of(rows: Rows) -> Table:
    table = Table(*rows[0], box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(table.columns):
        is_number = all(row[index][:1].isdigit() for row in rows[1])
        column.justify, column.overflow = ("right" if is_number else "left"), "fold"
    for row in rows[1]:
        table.add_row(*(Text(cell) for cell in row))
    return table


def group_lines(shape: Shape, groups: Mapping[str, FindingGroup]) -> Iterator[str]:
    """Yields lines on violations or failures in runs of a shape, the most frequent first."""
    for name, group in sorted(groups.items(), key=lambda item: -item[1].count):
        seeds = ", ".join(map(str, group.seeds)) + (", …" if group.count > len(group.seeds) else "")
        yield f"{_number(group.count, 'run')} of shape {shape}: {name}"
        yield f"  seeds {seeds}"
        if group.invariant is not None:
            yield f"  {INVARIANTS.get(group.invariant, '')} For one: {group.example}"


def rates_line(rates: BatchRates) -> str:
    wall_s = rates.wall_s or 1.0
    return (
        f"{rates.num_runs:,} runs in {_duration(rates.wall_s)} on {_number(rates.num_processes, 'process', 'processes')}: "
        f"{rates.num_runs / wall_s:,.1f} runs/s, {rates.num_tokens / wall_s:,.0f} tokens checked/s"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def markdown_of(tallies: Mapping[Shape, RunTotals], rates: BatchRates) -> str:
    """Returns the figures as Markdown for a page."""
    blocks = [
        f"{rates_line(rates)}.\n",
        _markdown_table(*shape_rows(tallies)),
        "Runs and tokens per second are those of one core.\n",
        _markdown_table(*distribution_rows(tallies)),
        "p10 / median / p90. A fault counts once, however many messages it hits.\n",
        _markdown_table(*fault_rows(tallies)),
        _markdown_table(*end_rows(tallies)),
    ]
    return "\n".join(blocks)


def _markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    rule = ["---:" if rows and all(row[index][:1].isdigit() for row in rows) else "---" for index in range(len(titles))]
    return "\n".join([line(titles), f"|{'|'.join(rule)}|", *map(line, rows)]) + "\n"


def document_of(tallies: Mapping[Shape, RunTotals], rates: BatchRates, codes: Mapping[str, int]) -> dict[str, Any]:
    """Returns the figures as a JSON document. `codes` is the number of runs by code digest."""
    total = sum_totals(list(tallies.values()))
    return {
        "rates": rates,
        "codes": codes,
        "shapes": {name: _figures(tally) for name, tally in [*tallies.items(), ("all", total)]},
        "never_fired": never_triggered(total),
    }


def _figures(tally: RunTotals) -> dict[str, Any]:
    figures = msgspec.to_builtins(tally)
    keys = {field.name: field.encode_name for field in msgspec.structs.fields(RunTotals)}
    for name in DISTRIBUTIONS:
        histogram = getattr(tally, name)
        figures[keys[name]] = {"total": total_of(histogram)} | {
            f"p{index}": percentile(histogram, index) for index in PERCENTS
        }
    return figures
