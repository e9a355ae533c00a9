import argparse

import pytest

from benchmarks.pd.pd_figures import (
    PdPair,
    PdRound,
    gaps_s,
    median_ratio,
    quantiles_ms,
    round_of,
    serve_flags,
    share_together,
    spread,
)
from benchmarks.pd.pd_load import PdLoadResult
from onward.bench.load import RequestTiming
from onward.bench.openai_chunks import ChunkUsage, PromptDetails
from onward.cli.flags import add_flags, from_args
from onward.config import ServeConfig
from onward.supervisor.pd_config import check_pd, prefill_peers_of


def round_with(gaps: list[float], side: str = "") -> PdRound:
    return PdRound(side, [0.01], gaps, [1.0], 1.0, 0, 0)


def test_a_spread_is_of_values_that_were_measured() -> None:
    values = [float(n) for n in range(1, 201)]
    assert spread(values) == spread(values[::-1])
    assert (spread(values).p50, spread(values).p90, spread(values).p99, spread(values).max) == (100, 180, 198, 200)


def test_a_wait_counts_where_it_began_also_if_it_outlasts_the_span() -> None:
    stream = RequestTiming(0.0, [1.0, 2.0, 2.5, 9.0, 9.5])
    assert gaps_s([stream], 2.0, 3.0) == [0.5, 6.5]
    assert gaps_s([stream, RequestTiming(0.0, [2.0])], 0.0, 2.0) == [1.0]


def test_tokens_that_were_read_together_are_counted_apart() -> None:
    assert share_together([0.02, 0.00001, 0.02, 0.021]) == 0.25
    assert share_together([0.02]) == 0.0


def test_a_round_keeps_the_quiet_part_apart_from_the_loaded_one() -> None:
    stream = RequestTiming(0.0, [1.0, 2.0, 3.0, 5.0, 7.0])
    prompts = [RequestTiming(3.0, [4.5, 4.6], 4.6, ChunkUsage(1500, 2, PromptDetails(16)))]
    seen = round_of("mixed", PdLoadResult([stream], prompts, 1.0, 3.0, 7.0))
    assert (seen.quiet_gaps_s, seen.gaps_s, seen.ttft_s) == ([1.0, 1.0], [2.0, 2.0], [1.5])
    assert seen.stream_tokens_per_s == 2 / 4
    assert (seen.prompt_tokens, seen.cached_tokens) == (1500, 16)


def test_pairs_are_judged_by_the_median_of_their_ratios_not_by_the_ratio_of_medians() -> None:
    # A machine that is ten times slower during one pair does not count more than the others.
    longest = [(0.1, 0.2), (1.0, 4.0), (0.3, 0.1)]
    pairs = [PdPair(round_with([a]), round_with([b])) for a, b in longest]
    assert median_ratio(pairs, lambda r: max(r.gaps_s)) == pytest.approx(0.5)


def test_quantiles_hold_a_distribution_with_its_tail() -> None:
    found = quantiles_ms([n / 1000 for n in range(1, 1001)])
    assert (found["1"], found["50"], found["99"], found["99.9"], found["100"]) == (10.0, 500.0, 990.0, 999.0, 1000.0)


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_the_flags_of_an_instance_are_ones_that_it_understands(role: str) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, ServeConfig)
    config: ServeConfig = from_args(
        parser.parse_args(serve_flags(role, 2, ["--num-kv-blocks", "70"], 4711)), ServeConfig
    )
    check_pd(config)
    assert (config.role, config.threads, config.num_kv_blocks) == (role, 2, 70)
    assert config.handoff_port == (4711 if role == "prefill" else None)
    assert prefill_peers_of(config) == (("tcp://127.0.0.1:4711",) if role == "decode" else ())
