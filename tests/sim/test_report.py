"""How runs are shown."""

from onward.sim.batch import FindingGroup, RunTotals
from onward.sim.fault_kinds import FAULT_KINDS
from onward.sim.report import (
    INVARIANTS,
    MIN_PLANNED,
    BatchRates,
    describe_violation,
    described,
    document_of,
    group_lines,
    markdown_of,
    never_triggered,
    percentile,
    styled,
    summary_of,
    total_of,
)
from onward.sim.scenario import FaultSpec, Scenario, SimInstanceSpec, SimRequest, Violation
from onward.sim.scenario_generator import generate_scenario
from onward.sim.simulation import run_scenario

RATES = BatchRates(wall_s=10.0, num_processes=2, num_runs=4, num_tokens=1000)


def test_percentiles_are_those_of_the_single_runs() -> None:
    histogram = {1: 1, 2: 3, 9: 1}
    assert [percentile(histogram, percent) for percent in (10, 50, 90, 100)] == [1, 2, 9, 9]
    assert total_of(histogram) == 16
    assert percentile({}, 50) == 0


def test_a_kind_that_was_drawn_often_and_never_struck_is_named() -> None:
    drawn = {"lose": MIN_PLANNED, "cut": MIN_PLANNED - 1, "abort": MIN_PLANNED}
    assert never_triggered(RunTotals(planned=drawn, triggered={"abort": 1})) == ["lose"]


def test_each_invariant_has_its_sentence_and_a_violation_tells_it() -> None:
    assert sorted(INVARIANTS) == list(range(11))
    told = describe_violation(Violation(3, "q1 gets it twice", 4.5))
    assert "invariant 3" in told and INVARIANTS[3] in told and "q1 gets it twice" in told


def test_lines_of_a_trace_keep_their_text_and_get_a_colour_by_kind() -> None:
    outcome = run_scenario(generate_scenario(3, "engine"), keeps_lines=True, keeps_messages=True)
    lines = {line: styled(line) for line in outcome.trace}
    assert all(text.plain == line for line, text in lines.items())
    colours = {str(text.spans[-1].style) for text in lines.values()}
    assert {"dim", "green", "bold yellow", "magenta"} <= colours


def test_a_summary_tells_what_happened() -> None:
    asks = [SimRequest("q0", 2.0, prompt="a"), SimRequest("q1", 2.0, prompt="the sea", max_tokens=30)]
    outcome = run_scenario(Scenario(3, "engine", [SimInstanceSpec("m0")], asks, [FaultSpec("kill-engine", "m0", 2.2)]))
    told = "\n".join(summary_of(outcome))
    assert outcome.digest in told
    assert "2 complete" in told
    assert "kill-engine" in told
    assert described(outcome.scenario) == "shape engine: m0 (mixed); 2 requests and 1 fault"


def test_groups_are_told_from_the_commonest_on() -> None:
    groups = {"3: #": FindingGroup(1, [9], "q", 3), "2: #": FindingGroup(40, list(range(20)), "q", 2)}
    lines = list(group_lines("pd", groups))
    assert lines[0] == "40 runs of shape pd: 2: #"
    assert lines[1].endswith(", …")
    assert lines[3] == "1 run of shape pd: 3: #"


def test_tables_for_a_page_are_whole() -> None:
    tally = RunTotals(
        num_runs=4,
        cpu_s=2.0,
        tokens={250: 4},
        planned=dict.fromkeys(FAULT_KINDS, 3),
        triggered={"lose": 7},
        end_reasons={"left": 1},
    )
    page = markdown_of({"pd": tally, "engine": tally}, RATES)
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert "4 runs in 10.0 s on 2 processes: 0.4 runs/s, 100 tokens checked/s" in page
    assert "| all | 8 |" in page
    assert all(kind in page for kind in FAULT_KINDS)
    assert all(line.endswith("|") for line in rows)


def test_figures_for_programs_have_the_distribution() -> None:
    tally = RunTotals(num_runs=4, tokens={250: 4}, planned={"lose": MIN_PLANNED})
    document = document_of({"pd": tally}, RATES, {"a": 4})
    assert document["shapes"]["pd"]["tokens"] == {"total": 1000, "p10": 250, "p50": 250, "p90": 250}
    assert document["never_fired"] == ["lose"]
