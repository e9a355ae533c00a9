"""Ranks exchange tensors: each in a thread, as processes do it."""

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onward.models.sharding.rank_exchange import RankExchange, create_store
from onward.models.sharding.rank_lost import RankLost
from onward.models.sharding.shard_plan import Shard

NUM_RANKS = 3


def of_all_ranks(run: Callable[[RankExchange], Any]) -> list[Any]:
    """Returns what each rank's call returns."""
    store_fd = create_store()
    results: list[Any] = [None] * NUM_RANKS

    def rank_thread(rank: int) -> None:
        exchange = RankExchange(Shard(rank, NUM_RANKS), os.dup(store_fd))
        exchange.connect()
        results[rank] = run(exchange)

    threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(store_fd)
    return results


def part_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn((7, 96), generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_are_added_in_the_order_of_the_ranks_in_float32(dtype: torch.dtype) -> None:
    def run(exchange: RankExchange) -> torch.Tensor:
        part = part_of(exchange.shard.rank, dtype)
        exchange.sum(part)
        return part

    parts = [part_of(rank, dtype).float() for rank in range(NUM_RANKS)]
    expected = ((parts[0] + parts[1]) + parts[2]).to(dtype)
    assert all(torch.equal(total, expected) for total in of_all_ranks(run))
    assert dtype != torch.float32 or not torch.equal(parts[0] + (parts[1] + parts[2]), expected), "the order matters"


def test_a_broadcast_has_the_values_of_rank_0_and_a_gather_gives_it_all() -> None:
    def run(exchange: RankExchange) -> tuple[list[int], list[list[int]], int]:
        rank = exchange.shard.rank
        tensor = torch.full((2,), 10 + rank, dtype=torch.int32)
        gathered = [part.tolist() for part in exchange.gather(tensor)]
        exchange.broadcast(tensor)
        return tensor.tolist(), gathered, exchange.smallest(7 - rank)

    assert of_all_ranks(run) == [
        ([10, 10], [[10, 10], [11, 11], [12, 12]], 5), ([10, 10], [], 5), ([10, 10], [], 5),
    ]  # fmt: skip


def test_an_exchange_with_a_rank_that_has_left_raises_rank_lost() -> None:
    def run(exchange: RankExchange) -> bool:
        if exchange.shard.rank == NUM_RANKS - 1:
            return True
        with pytest.raises(RankLost):
            exchange.sum(torch.ones(4))
        return True

    assert all(of_all_ranks(run))
