"""Deliberate bugs of workers with several ranks: what ranks share, and what ends a group."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from onward.models import rank_limits
from onward.models.layers.forward_batch import ForwardBatch
from onward.models.layers.step_arrays import BatchArrays
from onward.models.sharding.rank_exchange import RankExchange
from onward.models.sharding.shard_plan import Shard
from onward.models.sharding.sharded_tensors import ShardedTensors
from onward.supervisor import child_process
from onward.supervisor.child_process import ChildProcess
from onward.worker.kv_pool import PoolRegion
from onward.worker.tensor_parallel.leading_device import LeadingDevice
from tests.sabotage.patches import Patches, Sabotage

RANKS = "tests/supervisor/test_ranks.py::"
WORKER = "tests/worker/test_tensor_parallel.py::"
FLOATS = "tests/worker/test_float_ranks.py::"
EXCHANGE = "tests/models/sharding/test_rank_exchange.py::"


def _look_at_rank_0_only(patch: Patches) -> None:
    patch.put(ChildProcess, "has_ended", property(lambda self: self.process.poll() is not None))


def _let_the_first_rank_explain_the_end(patch: Patches) -> None:
    patch.put(child_process, "first_to_end", lambda return_codes: min(return_codes))


def _know_only_the_process_of_rank_0(patch: Patches) -> None:
    patch.put(ChildProcess, "pids", lambda self: {0: self.process.pid})


def _kill_rank_0_only(patch: Patches) -> None:
    def send_sigkill(self: ChildProcess) -> None:
        self.killed_by_supervisor = True
        self.process.kill()

    patch.put(ChildProcess, "send_sigkill", send_sigkill)


def _share_the_positions_of_an_earlier_step(patch: Patches) -> None:
    def take(original: Callable, self: BatchArrays, batch: ForwardBatch) -> Any:
        before = self.positions.copy()
        taken = original(self, batch)
        self.positions[:] = before
        return taken

    patch.around(BatchArrays, "take", take)


def _allow_any_number_of_ranks(patch: Patches) -> None:
    patch.put(rank_limits, "OUTPUT_UNIT", 1)


def _add_biases_at_every_rank(patch: Patches) -> None:
    def row_parallel(original: Callable, self: ShardedTensors, array: Any, owner: str, kind: str) -> Any:
        return array if kind == "bias" else original(self, array, owner, kind)

    patch.around(ShardedTensors, "_row_parallel", row_parallel)


def _add_parts_as_they_come(patch: Patches) -> None:
    def gathered_sum(self: RankExchange, part: torch.Tensor) -> None:
        parts = [torch.empty_like(part) for _ in range(self.shard.num_ranks)]
        self._wait(lambda group: group.allgather([parts], [part.contiguous()]))
        first, *others = parts[self.shard.rank :] + parts[: self.shard.rank]
        for other in others:
            first = first.float() + other
        part.copy_(first)

    patch.put(RankExchange, "sum", gathered_sum)


def _give_all_ranks_one_region(patch: Patches) -> None:
    def of_rank(original: Callable, config: Any, num_heads_before: int, *sizes: Any) -> PoolRegion:
        return original(config, 0, *sizes)

    patch.put(PoolRegion, "of_rank", functools.partial(of_rank, PoolRegion.of_rank))


def _forget_new_blocks(patch: Patches) -> None:
    def extend(self: LeadingDevice, slot: int, first: int, block_ids: Any, decoding_at: int | None) -> int:
        return self._device.extend(slot, first, block_ids, decoding_at)

    patch.put(LeadingDevice, "extend", extend)


def _divide_heads_apart_from_their_kv_heads(patch: Patches) -> None:
    patch.put(Shard, "query_heads", lambda self, config: self.share(config.num_heads, unit=1))


TABLE = [
    Sabotage(
        "rank-death-unnoticed",
        "the supervisor notices the death of rank 0 only",
        _look_at_rank_0_only,
        [
            RANKS + "test_a_rank_that_dies_takes_its_group_along[1-9-True]",
            RANKS + "test_a_rank_that_dies_takes_its_group_along[2-11-False]",
        ],
    ),
    Sabotage(
        "rank-fault-excused",
        "memory is kept although a rank died of a fault, because another one was killed",
        _let_the_first_rank_explain_the_end,
        [RANKS + "test_a_fault_of_one_rank_ends_the_memory_although_another_was_killed"],
    ),
    Sabotage(
        "ranks-not-listed",
        "only rank 0 is sampled and shown",
        _know_only_the_process_of_rank_0,
        [
            RANKS + "test_every_rank_is_shown_with_the_incarnation_of_its_group",
            RANKS + "test_a_group_whose_rank_stays_stopped_is_killed",
        ],
    ),
    Sabotage(
        "rank-survives-kill",
        "a kill of the worker leaves its other ranks alive",
        _kill_rank_0_only,
        [RANKS + "test_a_kill_of_the_worker_kills_all_ranks"],
    ),
    Sabotage(
        "stale-shared-batch",
        "ranks compute with the positions of an earlier step",
        _share_the_positions_of_an_earlier_step,
        [WORKER + "test_no_element_of_the_logits_differs_with_any_number_of_ranks[llama]"],
    ),
    Sabotage(
        "idle-ranks-allowed",
        "a model is started on more ranks than its matrices have parts",
        _allow_any_number_of_ranks,
        ["tests/models/test_rank_limits.py::test_a_rank_must_have_something_to_compute[3-False]"],
    ),
    Sabotage(
        "float-bias-of-every-rank",
        "each rank of a float model adds the biases of its summed products",
        _add_biases_at_every_rank,
        [FLOATS + "test_logits_of_ranks_are_those_of_one_rank_within_rounding[gpt2]"],
    ),
    Sabotage(
        "float-sum-in-any-order",
        "the parts of a sum are added in another order at each rank",
        _add_parts_as_they_come,
        [EXCHANGE + "test_sums_are_added_in_the_order_of_the_ranks_in_float32[torch.float32]"],
    ),
    Sabotage(
        "float-ranks-share-kv",
        "all ranks of a float model write the KV of their heads to one place",
        _give_all_ranks_one_region,
        [FLOATS + "test_logits_of_ranks_are_those_of_one_rank_within_rounding[qwen3]"],
    ),
    Sabotage(
        "float-ranks-miss-blocks",
        "other ranks do not get the blocks of a slot that grows",
        _forget_new_blocks,
        [FLOATS + "test_the_blocks_of_a_slot_that_grows_reach_all_ranks"],
    ),
    Sabotage(
        "float-heads-apart",
        "query heads are divided among ranks apart from their KV heads",
        _divide_heads_apart_from_their_kv_heads,
        [
            "tests/models/sharding/test_shard_plan.py::"
            "test_nine_heads_that_share_three_are_divided_unevenly_over_two_ranks"
        ],
    ),
]
