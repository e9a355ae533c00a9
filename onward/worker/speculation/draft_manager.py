"""The worker's side of drafts: asks the proposer, writes what it guesses behind the slots' tokens, and tells it what came
of it. What a peer has guessed for a new slot is used first, once. Verifies nothing: that is the drawing's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from onward.proto.step import AssignSlot
from onward.worker.batch_builder import TokenSpan
from onward.worker.speculation.proposer import ComputedSpan, DraftRequest, Proposer


class DraftManager:
    def __init__(self, proposer: Proposer, tokens: np.ndarray, *, vocab_size: int, max_rows: int) -> None:
        self._proposer = proposer
        self._tokens, self._vocab_size, self._max_rows = tokens, vocab_size, max_rows
        self._peer_drafts: dict[int, tuple[int, list[int]]] = {}
        """Of slots that have not drafted yet: what a peer has guessed, and the length of the list that it follows."""

    def on_assign(self, assign: AssignSlot) -> None:
        self._peer_drafts[assign.slot] = len(assign.token_ids), assign.draft_token_ids
        self._proposer.on_assign(assign.slot, len(assign.token_ids), assign.num_computed)

    def add_drafts(self, spans: Sequence[TokenSpan], wishes: Mapping[int, DraftRequest]) -> list[TokenSpan]:
        """The spans with drafts behind those whose slot has a wish, as far as the step has rows for them."""
        rows_left = self._max_rows - sum(span.num_rows for span in spans)
        assert rows_left >= 0, "the spans of a step fit into its rows"
        granted: list[DraftRequest] = []
        for wish in wishes.values():
            count = min(wish.num_drafts, rows_left)
            if count > 0:
                granted.append(replace(wish, num_drafts=count))
                rows_left -= count
        drafts = self._drafts(granted)
        return [self._drafted(span, drafts.get(span.slot)) for span in spans]

    def on_computed(
        self,
        spans: Sequence[TokenSpan],
        lengths: Sequence[tuple[int, int] | None],
        outputs: Callable[[], np.ndarray],
    ) -> None:
        """`lengths`: of each span's slot, if it is still there, how much is computed now and how long its list is."""
        told: list[ComputedSpan] = []
        row = 0
        for span, now in zip(spans, lengths, strict=True):
            if now is not None and now[0] > span.start:
                told.append(ComputedSpan(span.slot, span.start, now[0] - span.start, row, now[1]))
            row += span.num_rows
        if told:
            self._proposer.on_computed(told, outputs)

    def propose_for_peer(self, wish: DraftRequest) -> list[int]:
        """For somebody else to verify."""
        return self._valid_prefix(self._proposer.propose([wish])[0][: wish.num_drafts]) if wish.num_drafts > 0 else []

    def _drafts(self, wishes: Sequence[DraftRequest]) -> dict[int, list[int]]:
        given = {wish.slot: self._peer_drafts_for(wish) for wish in wishes}
        asked = [wish for wish in wishes if not given[wish.slot]]
        proposed = self._proposer.propose(asked) if asked else []
        for wish, drafts in zip(asked, proposed, strict=True):
            given[wish.slot] = drafts[: wish.num_drafts]
        return {slot: self._valid_prefix(drafts) for slot, drafts in given.items()}

    def _peer_drafts_for(self, wish: DraftRequest) -> list[int]:
        """Only in the place that they were guessed for: a step without drafts may have come before."""
        num_tokens, drafts = self._peer_drafts.pop(wish.slot, (0, []))
        return drafts[: wish.num_drafts] if num_tokens == wish.num_tokens else []

    def _valid_prefix(self, drafts: Sequence[int]) -> list[int]:
        """Up to the first that is no token of this model: no pass could compute it."""
        for index, token in enumerate(drafts):
            if not 0 <= token < self._vocab_size:
                return list(drafts[:index])
        return list(drafts)

    def _drafted(self, span: TokenSpan, drafts: list[int] | None) -> TokenSpan:
        if not drafts:
            return span
        assert span.is_sampled, "drafts follow the newest token only"
        end = span.start + span.count
        self._tokens[span.slot, end : end + len(drafts)] = drafts
        return replace(span, drafts=tuple(drafts))
