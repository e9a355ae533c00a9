"""The worker's side of drafts: calls the proposer, writes the drafts after the slots' tokens, and reports the computed
tokens to the proposer. Drafts that a peer has sent for a new slot are used first, once. The draft verifier decides
which drafts are accepted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onward.proto.step import AssignSlot
from onward.worker.speculation.proposer import ComputedSpan, DraftRequest, Proposer
from onward.worker.token_span import TokenSpan


class DraftManager:
    def __init__(
        self, proposer: Proposer, tokens: np.ndarray, last_hidden_states: Callable[[], np.ndarray], *, vocab_size: int,
        max_rows: int, draft_cost: float,
    ) -> None:  # fmt: skip
        """`last_hidden_states` returns, for every row of the last step, the hidden state that the model's head
        reads."""
        self._proposer, self._last_hidden_states, self.draft_cost = proposer, last_hidden_states, draft_cost
        self._tokens, self._vocab_size, self._max_rows = tokens, vocab_size, max_rows
        self._peer_drafts: dict[int, tuple[int, list[int]]] = {}
        """By slot, until its first drafts: the length of the token list that a peer's drafts follow, and these
        drafts."""

    def on_assign(self, assign: AssignSlot) -> None:
        self._peer_drafts[assign.slot] = len(assign.token_ids), assign.draft_token_ids
        self._proposer.on_assign(assign.slot, len(assign.token_ids), assign.num_computed)

    def add_drafts(self, spans: Sequence[TokenSpan[Any]], draft_requests: Mapping[int, DraftRequest]) -> bool:
        """Adds drafts to the spans whose slot has a draft request, as far as the step has rows for them. Returns whether
        there are any."""
        rows_left = self._max_rows - sum(span.num_rows for span in spans)
        assert rows_left >= 0, "the spans of a step fit into its rows"
        granted: list[DraftRequest] = []
        for draft_request in draft_requests.values():
            count = min(draft_request.num_drafts, rows_left)
            if count > 0:
                granted.append(replace(draft_request, num_drafts=count))
                rows_left -= count
        drafts = self._drafts(granted)
        for span in spans:
            if slot_drafts := drafts.get(span.slot):
                assert span.is_sampled, "drafts follow the newest token only"
                self._tokens[span.slot, span.end : span.end + len(slot_drafts)] = slot_drafts
                span.drafts = tuple(slot_drafts)
        return any(drafts.values())

    def on_computed(self, spans: Sequence[TokenSpan[Any]], lengths: Sequence[tuple[int, int] | None]) -> None:
        """Reports the computed spans to the proposer. `lengths` has the number of computed tokens and the length of the
        list of each span's slot; None if the slot has been cleared."""
        computed: list[ComputedSpan] = []
        row = 0
        for span, new_lengths in zip(spans, lengths, strict=True):
            if new_lengths is not None and new_lengths[0] > span.start:
                computed.append(ComputedSpan(span.slot, span.start, new_lengths[0] - span.start, row, new_lengths[1]))
            row += span.num_rows
        if computed:
            self._proposer.on_computed(computed, self._last_hidden_states)

    def propose_for_peer(self, draft_request: DraftRequest) -> list[int]:
        """Returns drafts for a peer, which will verify them."""
        if draft_request.num_drafts <= 0:
            return []
        return self._valid_prefix(self._proposer.propose([draft_request])[0][: draft_request.num_drafts])

    def _drafts(self, draft_requests: Sequence[DraftRequest]) -> dict[int, list[int]]:
        given = {draft_request.slot: self._peer_drafts_for(draft_request) for draft_request in draft_requests}
        remaining = [draft_request for draft_request in draft_requests if not given[draft_request.slot]]
        proposed = self._proposer.propose(remaining) if remaining else []
        for draft_request, drafts in zip(remaining, proposed, strict=True):
            given[draft_request.slot] = drafts[: draft_request.num_drafts]
        return {slot: self._valid_prefix(drafts) for slot, drafts in given.items()}

    def _peer_drafts_for(self, draft_request: DraftRequest) -> list[int]:
        """Removes a peer's drafts for the slot. Returns them if they start at the current end of the list, else none: a
        step without drafts may have come before."""
        num_tokens, drafts = self._peer_drafts.pop(draft_request.slot, (0, []))
        return drafts[: draft_request.num_drafts] if num_tokens == draft_request.num_tokens else []

    def _valid_prefix(self, drafts: Sequence[int]) -> list[int]:
        """Returns the drafts before the first one that is not a token of this model and so cannot be computed."""
        for index, token in enumerate(drafts):
            if not 0 <= token < self._vocab_size:
                return list(drafts[:index])
        return list(drafts)
