"""Deliberate bugs in the life of a step in the model runner, and the tests that notice each, on every device."""

from collections.abc import Callable

import numpy as np

from onward.proto.step import RunSlot, SlotFailed
from onward.worker import launched_step
from onward.worker.model_runner import ModelRunner
from onward.worker.slot_state import SlotState
from onward.worker.token_bitmasks import TokenBitmasks
from onward.worker.token_span import TokenSpan
from tests.sabotage.patches import Patches, Sabotage

RUNNER = "tests/worker/test_runner.py::"
GRAMMARS = "tests/worker/test_grammars.py::"


def _tell_what_a_failed_request_drew_later(patch: Patches) -> None:
    def failed(original: Callable, span: TokenSpan[SlotState], code: str, message: str, free: Callable) -> SlotFailed:
        event = original(span, code, message, free)
        span.slot_state.has_failed = False
        return event

    patch.around(launched_step, "_failed", failed)


def _count_a_token_that_was_not_drawn(patch: Patches) -> None:
    patch.put(SlotState, "undo_sample", lambda self: None)


def _forget_a_fault_behind_a_draft(patch: Patches) -> None:
    def fill_row(original: Callable, self: TokenBitmasks, row: int, slot: SlotState, bits: np.ndarray) -> None:
        slot.error = None
        original(self, row, slot, bits)

    patch.around(TokenBitmasks, "_fill_row", fill_row)


def _run_a_slot_of_another_epoch(patch: Patches) -> None:
    def span(original: Callable, self: ModelRunner, run: RunSlot) -> TokenSpan[SlotState] | None:
        slot = self._slots[run.slot]
        epoch = run.slot_epoch if slot is None else slot.slot_epoch
        return original(self, RunSlot(run.slot, epoch, run.num_tokens, run.new_block_ids, run.max_draft_tokens))

    patch.around(ModelRunner, "_span", span)


TABLE = [
    Sabotage(
        "failed-request-goes-on",
        "steps in flight give tokens of a request that has failed",
        _tell_what_a_failed_request_drew_later,
        [RUNNER + "test_logits_that_are_no_numbers_fail_their_request_and_void_what_it_has_in_flight[torch]"],
    ),
    Sabotage(
        "undrawn-token-counted",
        "a slot whose mask was late skips a position",
        _count_a_token_that_was_not_drawn,
        [
            GRAMMARS + f"test_a_slot_whose_mask_is_not_ready_skips_the_step_and_nobody_waits_for_it[{device}]"
            for device in ("int8", "torch")
        ],
    ),
    Sabotage(
        "fault-behind-a-draft-forgotten",
        "a grammar that failed behind an accepted draft goes on",
        _forget_a_fault_behind_a_draft,
        [GRAMMARS + "test_a_grammar_that_gives_up_behind_a_draft_fails_its_request_in_the_next_step"],
    ),
    Sabotage(
        "slot-of-another-epoch",
        "a plan for an earlier request of a slot runs the slot's next request",
        _run_a_slot_of_another_epoch,
        [RUNNER + f"test_a_run_of_another_epoch_is_ignored[{device}]" for device in ("int8", "torch")],
    ),
]
