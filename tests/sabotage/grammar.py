"""Deliberate bugs about grammars, and the tests that notice each."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from onward.engine.request import Request
from onward.engine.step_result_processor import StepResultProcessor
from onward.grammar.lazy import LazyGrammarCompiler
from onward.grammar.matcher import TokenBitmask
from onward.pd.handoff_events import HandoffKey
from onward.pd.prefill_handoff_protocol import PrefillHandoffProtocol
from onward.proto.handoff import PrefillDone
from onward.proto.sampling_params import Grammar
from onward.transport import shm_rows
from onward.worker.logits_processors import constraints
from onward.worker.logits_processors.constraints import ConstrainedSlot
from onward.worker.logits_processors.mask_executor import NextMask, ThreadedMaskExecutor, compute_inline
from onward.worker.logits_processors.slot_grammar import SlotGrammar
from tests.sabotage.patches import Patches, Sabotage

FAILURES = "tests/failures/test_grammars.py::"
WORKER = "tests/worker/test_grammars.py::"
EVENTS = "tests/conformance/test_events.py::"
MASKS = "tests/worker/test_mask_executor.py::"


def _start_over(patch: Patches) -> None:
    def begin(
        original: Callable, self: SlotGrammar, grammar: Grammar, output: Sequence[int], grammars: LazyGrammarCompiler
    ) -> TokenBitmask:
        return original(self, grammar, [], grammars)

    patch.around(SlotGrammar, "_start_matcher", begin)


def _use_a_mask_twice(patch: Patches) -> None:
    def advance(original: Callable, self: SlotGrammar, token_id: int) -> bool:
        stale = self._next
        is_done = original(self, token_id)
        self._next = stale
        return is_done

    patch.around(SlotGrammar, "advance", advance)


def _ignore_the_end(patch: Patches) -> None:
    def append(
        original: Callable, self: StepResultProcessor, request: Request, ids: list[int], done: bool
    ) -> list[int]:
        return original(self, request, ids, False)

    patch.around(StepResultProcessor, "_append", append)


def _do_not_hand_off_the_end(patch: Patches) -> None:
    def ready(
        original: Callable, self: PrefillHandoffProtocol, key: HandoffKey, done: PrefillDone, now_s: float
    ) -> None:
        original(self, key, msgspec.structs.replace(done, grammar_done=False), now_s)

    patch.around(PrefillHandoffProtocol, "ready", ready)


def _let_end_tokens_be_sampled_anywhere(patch: Patches) -> None:
    def fill(original: Callable, slot: ConstrainedSlot, bits: np.ndarray) -> int | None:
        forced = original(slot, bits)
        for token_id in slot.sampling.end_token_ids:
            bits[token_id >> 3] |= 1 << (token_id & 7)
        return forced

    patch.around(constraints, "fill_token_bitmask", fill)


def _lose_the_end_in_the_rows(patch: Patches) -> None:
    def tokens(original: Callable, *args: object) -> object:
        return msgspec.structs.replace(original(*args), grammar_done=False)

    patch.around(shm_rows, "_tokens", tokens)


def _make_every_mask_at_once(patch: Patches) -> None:
    def make(
        original: Callable, self: ThreadedMaskExecutor, compute: Callable[[], TokenBitmask], expected_s: float
    ) -> NextMask:
        return compute_inline(compute)

    patch.around(ThreadedMaskExecutor, "submit", make)


def _forget_slow_masks(patch: Patches) -> None:
    def make(
        original: Callable, self: ThreadedMaskExecutor, compute: Callable[[], TokenBitmask], expected_s: float
    ) -> NextMask:
        self._inline_budget_s = 1.0
        return original(self, compute, expected_s)

    patch.around(ThreadedMaskExecutor, "submit", make)


TABLE = [
    Sabotage(
        "grammar-starts-over",
        "F42: a grammar that was interrupted begins anew",
        _start_over,
        [
            FAILURES + f"test_f42_an_output_that_is_cut_anywhere_goes_on_as_if_it_had_not_been[{case}]"
            for case in ("0-regex", "1-json", "2-lark")  # not those of one token, which have no middle
        ],
    ),
    Sabotage(
        "stale-mask",
        "a token bitmask is used for two positions",
        _use_a_mask_twice,
        [
            WORKER + f"test_an_output_satisfies_its_grammar_and_says_when_it_is_done[{case}]"
            for case in ("int8-regex", "int8-json", "int8-lark", "torch-regex")
        ],
    ),
    Sabotage(
        "grammar-end-ignored",
        "an answer that is complete goes on",
        _ignore_the_end,
        [EVENTS + "test_a_token_that_completes_its_grammar_ends_the_output_whatever_else_is_asked"],
    ),
    Sabotage(
        "grammar-end-lost-on-one-wire",
        "one wire does not say that a grammar is done",
        _lose_the_end_in_the_rows,
        [EVENTS + "test_a_token_that_completes_its_grammar_ends_the_output_whatever_else_is_asked[shm]"],
    ),
    Sabotage(
        "grammar-end-not-handed-off",
        "a peer's token completes a grammar, and the handoff does not say so",
        _do_not_hand_off_the_end,
        ["tests/pd/test_prefill_handoff_protocol.py::test_that_a_grammar_is_done_is_told_with_the_tokens"],
    ),
    Sabotage(
        "ends-anywhere",
        "an answer ends before it is complete",
        _let_end_tokens_be_sampled_anywhere,
        [
            WORKER + f"test_an_end_token_is_sampled_only_where_the_output_is_complete[{device}]"
            for device in ("int8", "torch")
        ],
    ),
    Sabotage(
        "every-mask-at-once",
        "one slow grammar delays the tokens of all requests",
        _make_every_mask_at_once,
        [MASKS + "test_a_mask_that_may_take_long_is_made_by_another_thread_and_its_asker_goes_on"],
    ),
    Sabotage(
        "slow-masks-forgotten",
        "grammars that turn out to be slow delay all requests again and again",
        _forget_slow_masks,
        [MASKS + "test_masks_that_are_slow_after_all_do_not_hold_up_everybody_for_long"],
    ),
]
