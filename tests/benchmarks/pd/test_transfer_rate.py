"""The transfer benchmark: that it moves blocks between two processes in every way, not how fast that is."""

import pytest

from benchmarks.pd.transfer_rate import BACKENDS, TransferTiming, block_ids, measure, num_blocks_of, rate_of
from onward.proto.model import ModelConfig

SHAPE = ModelConfig("llama", 9, 64, 96, 3, 2, 2, 32, 256, 1e-5, 10_000.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_is_measured_with_blocks_in_both_orders_with_and_without_checksums(backend: str) -> None:
    rates = measure(backend, SHAPE, num_bytes=200_000, repetitions=1)
    assert [rate.backend for rate in rates] == [backend] * 4
    assert {(rate.order, rate.checksums) for rate in rates} == {
        (order, checksums) for order in ("in order", "random") for checksums in (False, True)
    }
    assert all(rate.mb_per_s > 0 and rate.copy_mb_per_s > 0 and rate.ratio > 0 for rate in rates)


def test_the_ratio_is_the_median_of_the_repetitions_each_beside_its_own_copy() -> None:
    timings = [TransferTiming(0.1, 0.05), TransferTiming(1.0, 0.1), TransferTiming(0.2, 0.02)]
    rate = rate_of("shm", "random", False, 10_000_000, timings)
    assert (rate.mb_per_s, rate.copy_mb_per_s, rate.ratio) == pytest.approx((50.0, 200.0, 0.1))


def test_every_block_goes_once_and_random_ones_leave_their_neighbours() -> None:
    assert block_ids("in order", 4, "") == ([0, 1, 2, 3], [0, 1, 2, 3])
    sources, targets = block_ids("random", 200, "seed")
    assert sorted(sources) == sorted(targets) == list(range(200))
    together = sum(b - a == 1 == d - c for a, b, c, d in zip(sources, sources[1:], targets, targets[1:], strict=False))
    assert together < 5


def test_the_number_of_blocks_comes_closest_to_the_bytes_and_is_never_none() -> None:
    one = 64_000_000 / num_blocks_of(SHAPE, 64_000_000)
    assert num_blocks_of(SHAPE, round(one * 2.4)) == 2
    assert num_blocks_of(SHAPE, 1) == 1
