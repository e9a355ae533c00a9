"""Deliberate bugs of workers with several ranks: what ranks share, and what ends a group."""

from collections.abc import Callable
from typing import Any

from onward.models import rank_limits
from onward.models.layers.forward_batch import ForwardBatch
from onward.models.layers.step_arrays import BatchArrays
from onward.supervisor import child_process
from onward.supervisor.child_process import ChildProcess
from tests.sabotage.patches import Patches, Sabotage

RANKS = "tests/supervisor/test_ranks.py::"
WORKER = "tests/worker/test_tensor_parallel.py::"


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
]
