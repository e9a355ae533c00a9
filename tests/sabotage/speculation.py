"""Deliberate bugs of proposers, and the tests that notice each. Outputs cannot differ by a wrong draft; but drafts may
silently become worse, memory may be missing, and time may be wasted.

What has kernels is imported where its row is put in: every process of every other row reads this table too.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from onward.engine.request import Request
from onward.engine.scheduling import scheduling_policy
from onward.engine.scheduling.slot_and_block_allocator import SlotAndBlockAllocator
from onward.proto.sampling_params import SamplingParams
from onward.worker.speculation.draft_block_hashes import DraftBlockHashes, HashedPrefix
from onward.worker.speculation.draft_manager import DraftManager
from onward.worker.speculation.draft_round import DraftRound
from onward.worker.speculation.proposer import ComputedSpan, DraftRequest
from tests.sabotage.patches import Patches, Sabotage

MODEL = "tests/worker/speculation/test_draft_model.py::"
EAGLE = "tests/worker/speculation/test_eagle.py::"
VERIFICATION = "tests/worker/speculation/test_verification.py::"
ENGINE = "tests/engine/test_drafts.py::"
GOES_ON = MODEL + "test_drafting_goes_on_from_what_was_accepted_and_what_came_instead"
SAME_NOISE = MODEL + "test_drafts_are_what_the_model_would_say_with_the_same_noise"
CHUNKING = EAGLE + "test_drafts_are_those_of_the_plain_layer_in_any_chunking"


def _keep_kv_of_rejected_drafts(patch: Patches) -> None:
    from onward.worker.speculation.draft_model_proposer import DraftModelProposer

    def take_list(original: Callable, self: DraftModelProposer, draft_request: DraftRequest) -> None:
        num_fed = self._progress[draft_request.slot].num_computed
        original(self, draft_request)
        self._progress[draft_request.slot].num_computed = min(num_fed, draft_request.num_tokens - 1)

    patch.around(DraftModelProposer, "_sync_tokens", take_list)


def _noise_of_the_next_position(patch: Patches) -> None:
    from onward.worker.speculation.draft_sampler import DraftSampler

    def sample(
        original: Callable, self: DraftSampler, logits: Any, draft_requests: list[DraftRequest], depths: list[int]
    ) -> list:
        return original(self, logits, draft_requests, [depth + 1 for depth in depths])

    patch.around(DraftSampler, "sample", sample)


def _noise_of_the_first_choice(patch: Patches) -> None:
    from onward.worker.speculation import draft_sampler

    def sample(original: Callable, sampling: SamplingParams, position: int) -> object:
        return original(msgspec.structs.replace(sampling, choice_index=0), position)

    patch.around(draft_sampler, "SamplingRow", sample)


def _penalties_of_rejected_drafts_stay(patch: Patches) -> None:
    from onward.worker.logits_processors.penalties import LogitsProcessor

    patch.put(LogitsProcessor, "copy", lambda self: self)


def _drafts_are_not_penalized_for_each_other(patch: Patches) -> None:
    from onward.worker.speculation.draft_sampler import DraftSampler

    def sample(original: Callable, self: DraftSampler, *given: Any) -> list:
        kept = {slot: processor.copy() for slot, processor in self._round_processors.items()}
        sampled = original(self, *given)
        self._round_processors = kept
        return sampled

    patch.around(DraftSampler, "sample", sample)


def _penalties_of_the_last_request_stay(patch: Patches) -> None:
    from onward.worker.speculation.draft_sampler import DraftSampler

    patch.put(DraftSampler, "on_assign", lambda self, slot: None)


def _penalties_stay_behind_the_list(patch: Patches) -> None:
    from onward.worker.speculation.draft_sampler import DraftSampler

    def rules_of(original: Callable, self: DraftSampler, draft_request: DraftRequest, tokens: Any) -> object:
        known = self._processors.get(draft_request.slot)
        return original(self, draft_request, tokens) if known is None else known.processor

    patch.around(DraftSampler, "_processor_of", rules_of)


def _every_cached_block_is_taken_for_its_own(patch: Patches) -> None:
    def find(original: Callable, self: DraftBlockHashes, table: Any, tokens: Any) -> HashedPrefix:
        found = HashedPrefix()
        for index in range(len(tokens) // self._block_size):
            found.count, found.last = index + 1, self._hash_at(found.last, tokens, index)
        return found

    patch.around(DraftBlockHashes, "match_prefix", find)


def _no_cached_block_is_known(patch: Patches) -> None:
    patch.put(DraftBlockHashes, "match_prefix", lambda self, table, tokens: HashedPrefix())


def _written_blocks_keep_their_names(patch: Patches) -> None:
    patch.put(DraftBlockHashes, "invalidate", lambda self, table, start, end: None)


def _names_for_what_is_not_computed_yet(patch: Patches) -> None:
    from onward.worker.speculation.draft_model_proposer import DraftModelProposer

    def give_names(original: Callable, self: DraftModelProposer, draft_request: DraftRequest) -> None:
        fed = self._progress[draft_request.slot]
        self._block_hashes.record(
            fed.hashed_prefix,
            self._table(draft_request.slot),
            self._tokens[draft_request.slot, : draft_request.num_tokens],
        )

    patch.around(DraftModelProposer, "_record_hashes", give_names)


def _a_slot_keeps_what_its_last_request_had_computed(patch: Patches) -> None:
    from onward.worker.speculation.draft_model_proposer import DraftModelProposer

    def assigned(original: Callable, self: DraftModelProposer, slot: int, num_tokens: int, num_computed: int) -> None:
        num_fed = self._progress[slot].num_computed
        original(self, slot, num_tokens, num_computed)
        self._progress[slot].num_computed = max(self._progress[slot].num_computed, min(num_fed, num_tokens - 1))

    patch.around(DraftModelProposer, "on_assign", assigned)


def _the_draft_models_memory_is_not_counted(patch: Patches) -> None:
    from onward.worker.speculation.draft_model_proposer import DraftModelProposerFactory

    patch.put(DraftModelProposerFactory, "bytes_per_block", 1)


def _a_draft_layers_memory_is_not_counted(patch: Patches) -> None:
    from onward.worker.speculation.eagle_proposer import EagleProposerFactory

    patch.put(EagleProposerFactory, "bytes_per_block", 1)


def _draft_behind_an_end(patch: Patches) -> None:
    def take(original: Callable, self: DraftRound, slot: int, token: int | None) -> None:
        draft_request = self.draft_requests[slot]
        self.draft_requests[slot] = replace(
            draft_request, sampling=msgspec.structs.replace(draft_request.sampling, end_token_ids=())
        )
        original(self, slot, token)
        self.draft_requests[slot] = draft_request

    patch.around(DraftRound, "add", take)


def _draft_beyond_the_context(patch: Patches) -> None:
    def init(original: Callable, self: DraftRound, draft_requests: Sequence[DraftRequest], max_model_len: int) -> None:
        original(self, draft_requests, 1 << 20)

    patch.around(DraftRound, "__init__", init)


def _hidden_states_of_the_next_row(patch: Patches) -> None:
    from onward.worker.speculation.eagle_proposer import EagleProposer

    def with_known_next_tokens(span: ComputedSpan) -> ComputedSpan:
        count = min(span.count, span.num_tokens - 1 - span.start)
        return ComputedSpan(span.slot, span.start, count, span.first_row + 1, span.num_tokens)

    patch.put(EagleProposer, "_with_known_next_tokens", staticmethod(with_known_next_tokens))


def _pairs_of_a_state_and_its_own_token(patch: Patches) -> None:
    from onward.worker.speculation.eagle_proposer import EagleProposer

    def computed(original: Callable, self: EagleProposer, spans: Sequence[ComputedSpan], outputs: Callable) -> None:
        tokens = self._context.tokens.copy()
        self._context.tokens[:, 1:] = tokens[:, :-1]
        original(self, spans, outputs)
        self._context.tokens[:] = tokens

    patch.around(EagleProposer, "on_computed", computed)


def _drafted_pairs_at_the_position_of_their_token(patch: Patches) -> None:
    from onward.worker.speculation.eagle_proposer import EagleProposer

    def draft(
        original: Callable, self: EagleProposer, draft_requests: Sequence[DraftRequest], hidden: Any, round_: DraftRound
    ) -> Any:
        later = [
            replace(draft_request, num_tokens=draft_request.num_tokens + 1, num_prompt=draft_request.num_prompt + 1)
            for draft_request in draft_requests
        ]
        return original(self, later, hidden, round_)

    patch.around(EagleProposer, "_draft", draft)


def _what_the_layer_said_last_is_not_kept(patch: Patches) -> None:
    from onward.worker.speculation.eagle_proposer import EagleProposer

    def computed(original: Callable, self: EagleProposer, spans: Sequence[ComputedSpan], outputs: Callable) -> None:
        before = self._outputs.copy()
        original(self, spans, outputs)
        for span in spans:
            if span.start:
                self._outputs[span.slot] = before[span.slot]

    patch.around(EagleProposer, "on_computed", computed)


def _pairs_that_nobody_has_computed_count(patch: Patches) -> None:
    from onward.worker.speculation.eagle_proposer import EagleProposer

    def assigned(original: Callable, self: EagleProposer, slot: int, num_tokens: int, num_computed: int) -> None:
        original(self, slot, num_tokens, num_computed)
        self._pairs[slot].num_pairs = num_computed

    patch.around(EagleProposer, "on_assign", assigned)


def _a_peers_drafts_are_used_late(patch: Patches) -> None:
    def given_for(original: Callable, self: DraftManager, draft_request: DraftRequest) -> list[int]:
        return self._peer_drafts.pop(draft_request.slot, (0, []))[1][: draft_request.num_drafts]

    patch.around(DraftManager, "_peer_drafts_for", given_for)


def _one_mask_for_all_rows(patch: Patches) -> None:
    from onward.worker import draft_verifier

    patch.put(draft_verifier, "_rows_at_once", lambda verifier: range(1 + len(verifier.span.drafts)))


def _a_peers_drafts_are_too_costly(patch: Patches) -> None:
    def num_drafts(
        original: Callable, limit: int, record: Any, load: scheduling_policy.StepLoad, num_given: int = 0
    ) -> int:
        return original(limit, record, load)

    patch.around(scheduling_policy, "choose_num_drafts", num_drafts)


def _draft_beyond_the_longest_output(patch: Patches) -> None:
    patch.put(Request, "max_drafts_now", property(lambda self: self.max_drafts))


def _who_waits_for_blocks_fills_the_step(patch: Patches) -> None:
    patch.put(SlotAndBlockAllocator, "can_allocate", lambda self, request: self.slots.num_free > 0)


TABLE = [
    Sabotage(
        "rejected-kv-kept",
        "a model drafts after the KV of its rejected drafts",
        _keep_kv_of_rejected_drafts,
        [
            MODEL + f"test_what_was_said_while_nobody_asked_replaces_what_was_drafted[{num_missed}]"
            for num_missed in (2, 3, 6)  # a single one is computed anyhow, to know what follows it
        ],
    ),
    Sabotage(
        "draft-noise-next-position",
        "a draft is sampled with the noise of the next position",
        _noise_of_the_next_position,
        [SAME_NOISE + "[sampled]", EAGLE + "test_sampled_drafts_have_the_noise_that_the_served_model_would_have"],
    ),
    Sabotage(
        "draft-noise-first-choice",
        "drafts for every choice are sampled with the first one's noise",
        _noise_of_the_first_choice,
        [SAME_NOISE + "[sampled]", EAGLE + "test_sampled_drafts_have_the_noise_that_the_served_model_would_have"],
    ),
    Sabotage(
        "draft-penalties-of-rejected",
        "rejected drafts are penalized in later drafts",
        _penalties_of_rejected_drafts_stay,
        [GOES_ON + "[0-penalized]"],
    ),
    Sabotage(
        "draft-penalties-within-a-run",
        "a draft is not penalized for the drafts before it",
        _drafts_are_not_penalized_for_each_other,
        [SAME_NOISE + "[penalized]"],
    ),
    Sabotage(
        "draft-penalties-of-the-last",
        "a slot's drafts are penalized for the tokens of its last request",
        _penalties_of_the_last_request_stay,
        [MODEL + "test_the_next_request_of_a_slot_has_rules_of_its_own"],
    ),
    Sabotage(
        "draft-penalties-stay-behind",
        "drafts are not penalized for what was said since the first ones",
        _penalties_stay_behind_the_list,
        [GOES_ON + "[0-penalized]", GOES_ON + "[2-penalized]"],
    ),
    Sabotage(
        "draft-kv-of-others",
        "a cached block that a drafting model has not computed is used for its KV",
        _every_cached_block_is_taken_for_its_own,
        [
            MODEL + "test_blocks_that_somebody_else_filled_are_caught_up_with",
            EAGLE + "test_kv_of_a_peer_has_no_hidden_states_and_so_no_drafts[32]",
        ],
    ),
    Sabotage(
        "draft-kv-twice",
        "what a drafting model has computed of a cached prefix is computed again",
        _no_cached_block_is_known,
        [
            MODEL + "test_cached_blocks_that_it_has_filled_itself_are_not_computed_again",
            EAGLE + "test_a_prefix_that_it_has_computed_is_gone_on_from",
        ],
    ),
    Sabotage(
        "draft-hashes-kept",
        "a block that is overwritten keeps the hash of what it held",
        _written_blocks_keep_their_names,
        [
            MODEL + "test_a_block_that_another_slot_began_to_fill_has_lost_its_name",
            EAGLE + "test_a_block_that_another_slot_began_to_fill_is_no_prefix_any_more",
        ],
    ),
    Sabotage(
        "draft-hashes-early",
        "blocks that a drafting model has not computed yet get a hash",
        _names_for_what_is_not_computed_yet,
        [MODEL + "test_a_prefix_that_is_only_half_caught_up_with_is_shared_as_far_as_it_is"],
    ),
    Sabotage(
        "draft-slot-not-emptied",
        "a slot's new request drafts over the KV of its last one",
        _a_slot_keeps_what_its_last_request_had_computed,
        [MODEL + "test_blocks_that_somebody_else_filled_are_caught_up_with"],
    ),
    Sabotage(
        "draft-memory-not-counted",
        "a drafting model takes more memory than it says",
        _the_draft_models_memory_is_not_counted,
        [
            "tests/worker/speculation/test_draft_model_factory.py::test_the_memory_that_counts_is_the_memory_that_is_taken"
        ],
    ),
    Sabotage(
        "eagle-memory-not-counted",
        "a draft layer takes more memory than it says",
        _a_draft_layers_memory_is_not_counted,
        [EAGLE + "test_its_memory_counts_for_each_block"],
    ),
    Sabotage(
        "draft-behind-an-end",
        "rows are spent on what can never be said",
        _draft_behind_an_end,
        [MODEL + "test_nothing_is_drafted_behind_an_end", EAGLE + "test_nothing_is_drafted_behind_an_end"],
    ),
    Sabotage(
        "draft-beyond-the-context",
        "drafts have positions that the model has not",
        _draft_beyond_the_context,
        [MODEL + "test_nothing_is_drafted_beyond_the_longest_context"],
    ),
    Sabotage(
        "draft-beyond-the-output",
        "drafts lie behind max_tokens",
        _draft_beyond_the_longest_output,
        [ENGINE + "test_no_draft_lies_beyond_the_longest_output"],
    ),
    Sabotage(
        "eagle-next-row",
        "a pair has the hidden state of another row",
        _hidden_states_of_the_next_row,
        [CHUNKING],
    ),
    Sabotage(
        "eagle-own-token",
        "a pair has the token of its hidden state, and not the one behind it",
        _pairs_of_a_state_and_its_own_token,
        [CHUNKING],
    ),
    Sabotage(
        "eagle-position",
        "pairs of drafts lie one position too far",
        _drafted_pairs_at_the_position_of_their_token,
        [CHUNKING],
    ),
    Sabotage(
        "eagle-stale-output",
        "a draft layer drafts from its output of the pass before",
        _what_the_layer_said_last_is_not_kept,
        [EAGLE + "test_drafting_goes_on_from_what_was_accepted"],
    ),
    Sabotage(
        "eagle-missing-pairs",
        "a draft layer drafts over KV that it never computed",
        _pairs_that_nobody_has_computed_count,
        [EAGLE + "test_kv_of_a_peer_has_no_hidden_states_and_so_no_drafts"],
    ),
    Sabotage(
        "peer-drafts-late",
        "a peer's draft for one position is verified at a later one",
        _a_peers_drafts_are_used_late,
        [VERIFICATION + "test_a_peer_s_drafts_are_left_out_once_another_step_has_come_before"],
    ),
    Sabotage(
        "peer-drafts-costly",
        "a peer's drafts are not used where drafting does not pay",
        _a_peers_drafts_are_too_costly,
        [ENGINE + "test_a_peer_s_drafts_are_verified_also_where_drafting_would_not_pay"],
    ),
    Sabotage(
        "one-mask-for-all-drafts",
        "every row of a slot's drafts is sampled under the bitmask of its first one",
        _one_mask_for_all_rows,
        [
            "tests/worker/speculation/test_rules.py::test_an_output_under_a_grammar_is_the_same_with_drafts"
            f"[{wrong_at}-{case}]"
            for wrong_at in (1, 99)
            for case in ("json", "lark")
        ],
    ),
    Sabotage(
        "no-drafts-while-short",
        "no request drafts while the next in line waits for blocks",
        _who_waits_for_blocks_fills_the_step,
        [ENGINE + "test_while_the_next_in_line_waits_for_blocks_the_others_go_on_drafting"],
    ),
]
