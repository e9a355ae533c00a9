"""Figures of `onward bench` beside those of other load generators. Their files are written here, in the form of each."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.clients import figures, paced_server
from benchmarks.clients.figures import COMPARED, Figures, Pair, all_agree, compare, table
from benchmarks.clients.paced_server import PacedProcess
from benchmarks.clients.programs import AiPerf, EvalScope, GuideLlm, Load, Onward, Program
from onward.bench.load import RequestTiming
from onward.bench.openai_chunks import ChunkUsage
from onward.bench.report import summarize

EXPECTED = Figures(
    num_requests=20, prompt_tokens=127.0, output_tokens=32.0, requests_per_s=3.5, output_tokens_per_s=112.0,
    ttft_p50_s=0.3, ttft_p99_s=0.6, tpot_p50_s=0.025, request_p50_s=1.2, inter_token_p50_s=0.02,
)  # fmt: skip


def distribution(p50: float, p99: float = 0.0) -> dict[str, Any]:
    return {"mean": 9.9, "median": p50, "percentiles": {"p001": 0.0, "p50": p50, "p99": p99, "p999": 99.0}}


def test_a_file_of_guidellm_is_read() -> None:
    def of_all(successful: Any) -> dict[str, Any]:
        return {"successful": successful, "errored": None, "incomplete": None, "total": distribution(7.0, 7.0)}

    metrics = {
        "request_totals": {"successful": 20, "errored": 1, "incomplete": 2, "total": 23},
        "requests_per_second": of_all({"mean": 3.5, "median": 2.2}),
        "output_tokens_per_second": of_all({"mean": 112.0, "median": 85.0}),
        "prompt_token_count": of_all({"mean": 127.0}),
        "output_token_count": of_all({"mean": 32.0}),
        "time_to_first_token_ms": of_all(distribution(300.0, 600.0)),
        "inter_token_latency_ms": of_all(distribution(25.0, 30.0)),
        "time_per_output_token_ms": of_all(distribution(37.5, 43.0)),
        "request_latency": of_all(distribution(1.2, 1.4)),
    }
    found = figures.of_guidellm({"metadata": {"version": 2}, "benchmarks": [{"metrics": metrics}]})
    assert found == replace(EXPECTED, inter_token_p50_s=None)


def test_a_file_of_aiperf_is_read() -> None:
    document = {
        "schema_version": "1.4",
        "request_count": {"unit": "requests", "avg": 20.0},
        "request_throughput": {"unit": "requests/sec", "avg": 3.5},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 112.0},
        "input_sequence_length": {"unit": "tokens", "avg": 127.0, "p50": 127.0},
        "output_sequence_length": {"unit": "tokens", "avg": 32.0, "p50": 32.0},
        "time_to_first_token": {"unit": "ms", "avg": 310.0, "p50": 300.0, "p99": 600.0},
        "inter_token_latency": {"unit": "ms", "avg": 26.0, "p50": 25.0, "p99": 30.0},
        "inter_chunk_latency": {"unit": "ms", "avg": 26.0, "p50": 20.0, "p99": 450.0},
        "request_latency": {"unit": "ms", "avg": 1210.0, "p50": 1200.0, "p99": 1400.0},
    }
    assert figures.of_aiperf(document) == EXPECTED


def test_files_of_evalscope_are_read() -> None:
    summary = {
        "Total Requests": 21,
        "Success Requests": 20,
        "Failed Requests": 1,
        "Req Throughput (req/s)": 3.5,
        "Output Throughput (tok/s)": 112.0,
        "Avg Input Tokens": 127.0,
        "Avg Output Tokens": 32.0,
    }
    rows = [
        {"Percentiles": name, "Latency (s)": latency, "TTFT (ms)": ttft, "ITL (ms)": itl, "TPOT (ms)": tpot}
        for name, latency, ttft, itl, tpot in (("50%", 1.2, 300.0, 20.0, 25.0), ("99%", 1.4, 600.0, 27.0, 35.0))
    ]
    assert figures.of_evalscope(summary, rows) == EXPECTED


def test_a_file_of_ours_is_read() -> None:
    # A token each at 1, 2 and 5 s: two seconds per token after the first; the median of the two gaps is the shorter.
    records = [
        RequestTiming(0.0, [1.0, 2.0, 5.0], 6.0, ChunkUsage(100, 3)),
        RequestTiming(0.0, [], 8.0, None, "HTTP 500: oops"),
    ]
    document = msgspec.json.decode(msgspec.json.encode({"schema": 1, "summary": summarize(records)}))
    assert figures.of_onward(document) == Figures(1, 100.0, 3.0, 1 / 8, 3 / 8, 1.0, 1.0, 2.0, 6.0, 1.0)


def test_a_run_that_is_not_the_load_asked_for_is_refused() -> None:
    EXPECTED.check(20, 32)
    for requests, tokens in ((21, 32), (20, 33)):
        with pytest.raises(ValueError, match=f"not {requests} of {tokens}"):
            EXPECTED.check(requests, tokens)


def test_pairs_come_to_the_median_of_their_ratios() -> None:
    ours = [1.0, 2.0, 30.0]
    pairs = [
        Pair("other", replace(EXPECTED, requests_per_s=one), replace(EXPECTED, requests_per_s=2.0)) for one in ours
    ]
    found = compare(pairs, COMPARED["requests/s"])
    assert found is not None
    assert (found.ours, found.theirs, found.ratio, found.lowest, found.highest) == (2.0, 2.0, 1.0, 0.5, 15.0)
    assert found.agrees and not replace(found, ratio=1.11).agrees and not replace(found, ratio=0.89).agrees


def test_the_table_marks_what_disagrees_and_leaves_out_what_is_not_reported() -> None:
    near = Pair("near", EXPECTED, replace(EXPECTED, ttft_p50_s=0.29, inter_token_p50_s=None))
    far = Pair("far", EXPECTED, replace(EXPECTED, ttft_p50_s=0.15))
    assert all_agree([near]) and not all_agree([near, far])
    lines = {line.split(" | ")[0].strip("| "): line for line in table([near, far]).splitlines()}
    assert lines["time to first token, p50 (ms)"].endswith(
        "| 300 : 290 = 1.03 (1.03 to 1.03) | 300 : 150 = **2.00** (2.00 to 2.00) |"
    )
    assert " | – | 20.0 : 20.0 = 1.00 " in lines["between tokens, p50 (ms)"]


def test_the_paced_server_has_the_times_that_it_promises() -> None:
    times = list(paced_server.token_times_s(5, 65))
    gaps = sorted(b - a for a, b in pairwise(times))
    assert gaps[32] == pytest.approx(0.010) and sum(gaps) / len(gaps) == pytest.approx(0.01375)
    firsts = sorted(next(paced_server.token_times_s(number, 1)) for number in range(700, 800))
    assert firsts[0] >= 0.1 and firsts[-1] <= 0.3
    assert firsts[50] == pytest.approx(0.2, abs=0.01)


LOAD = Load("http://127.0.0.1:1", "m", streams=2, requests=5, prompt_tokens=40, output_tokens=3, num_words=10)


@pytest.mark.parametrize(
    "program", [GuideLlm("guidellm"), AiPerf("aiperf", Path("tokenizer")), EvalScope("evalscope")], ids=lambda p: p.name
)
def test_other_programs_get_as_many_prompts_of_the_same_length(program: Program, tmp_path: Path) -> None:
    command = program.command(LOAD, "seed", tmp_path)
    (file,) = tmp_path.iterdir()
    assert str(file) in " ".join(command)
    lines = file.read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) if file.suffix == ".jsonl" else {"text": line} for line in lines]
    prompts = [row.get("prompt") or row["text"] for row in rows]
    assert len({*prompts}) == 5 and {len(prompt.split()) for prompt in prompts} == {10}
    assert prompts == LOAD.prompts("seed") != LOAD.prompts("another seed")


def test_onward_bench_measures_the_paced_server(tmp_path: Path) -> None:
    with PacedProcess() as server:
        load = replace(LOAD, url=server.url, model=paced_server.MODEL)
        found = Onward().measure(load, "seed", tmp_path / "run")
    assert (found.num_requests, found.prompt_tokens, found.output_tokens) == (5, 40, 3)
    assert (tmp_path / "run" / "output.txt").read_text()
