"""Drafts by a small model of the same vocabulary, with KV of its own under the served model's block ids.

It computes what it needs when drafts are asked for, and nothing before: a request that wants none costs nothing, and a
first token never waits for it. What is missing, a whole prompt or the few tokens since the last time, is caught up with
in pieces, since every stream of the step waits for them; a slot that is not through yet gets no drafts.

    the slot's list    |-------------------------------------------|
                       0                                       num_tokens
    what was fed       |------------------------|·· drafts ··|        only what equals the list counts
                       0                               num_fed
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onward.models.decoder import build_decoder
from onward.models.layers.paged_kv import kv_dtype
from onward.proto.model import PreparedModel
from onward.worker import kv_pool
from onward.worker.batch_builder import BatchBuilder, TokenSpan
from onward.worker.speculation.draft_block_hashes import DraftBlockHashes, HashedPrefix
from onward.worker.speculation.draft_round import DraftRound
from onward.worker.speculation.draft_sampler import DraftSampler
from onward.worker.speculation.proposer import ComputedSpan, DraftRequest, ProposerContext

MIN_CATCH_UP_TOKENS = 16
"""Tokens that each slot may compute in a round, whatever the others need: more than a step adds to its list, mostly, so
that everybody gets through."""


@dataclass(slots=True)
class _SlotProgress:
    """Of one slot."""

    num_computed: int = 0
    """Leading tokens of its row of `_tokens` that have KV."""
    num_listed: int = 0
    """Leading tokens of that row that are the slot's list."""
    named: HashedPrefix = field(default_factory=HashedPrefix)


class DraftModelProposer:
    def __init__(self, model: PreparedModel, weights: Mapping[str, Any], around: ProposerContext) -> None:
        config, slots = model.config, around.config.max_num_seqs
        self._around, self._vocab_size = around, config.vocab_size
        self._max_rows = max(around.config.max_num_batched_tokens, slots, MIN_CATCH_UP_TOKENS)
        self._tokens = np.zeros_like(around.tokens)
        self._fed = [_SlotProgress() for _ in range(slots)]
        self._names = DraftBlockHashes(around.num_blocks, around.config.block_size)
        dtype = kv_dtype(config, model.quantization)
        self._kv = kv_pool.allocate_kv_pool(config, dtype, around.num_blocks, around.config.block_size)
        self._batch = BatchBuilder(config, self._tokens, around.tables, around.config.block_size, self._max_rows)
        self._drawing = DraftSampler(config.vocab_size, slots, around.threads)
        self._decoder = build_decoder(
            model,
            weights,
            self._kv.kv,
            max_model_len=around.max_model_len,
            max_rows=self._max_rows,
            max_sampled=slots,
            threads=around.threads,
        )
        self._decoder.forward(
            self._batch.build([TokenSpan(0, 0, 1, is_sampled=True)])
        )  # compiles, and touches every weight

    def on_assign(self, slot: int, num_tokens: int, num_computed: int) -> None:
        self._drawing.on_assign(slot)
        self._copy(slot, 0, num_tokens)
        named = self._names.match_prefix(self._table(slot), self._tokens[slot, :num_computed])
        self._fed[slot] = _SlotProgress(named.count * self._around.config.block_size, num_tokens, named)

    def on_computed(self, spans: Sequence[ComputedSpan], outputs: Callable[[], np.ndarray]) -> None:
        """What the served model computes is of no use here."""

    def propose(self, wishes: Sequence[DraftRequest]) -> list[list[int]]:
        round_ = DraftRound(wishes, self._around.max_model_len)
        wanted = [wish for wish in wishes if wish.num_drafts > 0]
        for wish in wanted:
            self._sync_tokens(wish)
        self._drawing.begin(wanted, self._tokens)
        for spans in _passes(self._catch_up_spans(wanted), self._max_rows):
            self._compute(spans, round_)
        for wish in wanted:
            self._record_hashes(wish)
        while spans := [
            TokenSpan(slot, self._fed[slot].num_computed, 1, is_sampled=True) for slot in round_.active_slots
        ]:
            self._compute(spans, round_)
        return [round_.drafts[wish.slot] for wish in wishes]

    def _sync_tokens(self, wish: DraftRequest) -> None:
        """Drafts that were not accepted count no more; the last token is computed anyhow, to know what follows it."""
        fed = self._fed[wish.slot]
        assert fed.num_listed <= wish.num_tokens, "the token list of a request only grows"
        start, end = fed.num_listed, min(fed.num_computed, wish.num_tokens)
        guessed = self._tokens[wish.slot, start:end].copy()
        self._copy(wish.slot, start, wish.num_tokens)
        wrong = np.flatnonzero(guessed != self._tokens[wish.slot, start:end])
        right = start + int(wrong[0]) if len(wrong) else fed.num_computed
        fed.num_computed, fed.num_listed = min(right, wish.num_tokens - 1), wish.num_tokens

    def _copy(self, slot: int, start: int, end: int) -> None:
        """Models of one vocabulary may still be padded to different sizes."""
        np.minimum(self._around.tokens[slot, start:end], self._vocab_size - 1, out=self._tokens[slot, start:end])

    def _catch_up_spans(self, wishes: Sequence[DraftRequest]) -> list[TokenSpan]:
        left, spans = self._max_rows, []
        for wish in wishes:
            start = self._fed[wish.slot].num_computed
            count = min(wish.num_tokens - start, max(MIN_CATCH_UP_TOKENS, left))
            left -= count
            spans.append(TokenSpan(wish.slot, start, count, is_sampled=start + count == wish.num_tokens))
        return spans

    def _compute(self, spans: Sequence[TokenSpan], round_: DraftRound) -> None:
        for span in spans:
            assert span.start == self._fed[span.slot].num_computed, "a span starts where the slot's computed tokens end"
            self._names.invalidate(self._table(span.slot), span.start, span.start + span.count)
        logits = self._decoder.forward(self._batch.build(spans))
        for span in spans:
            self._fed[span.slot].num_computed = span.start + span.count
        drawn_for = [round_.wishes[span.slot] for span in spans if span.is_sampled]
        if not drawn_for:
            return
        depths = [len(round_.drafts[wish.slot]) for wish in drawn_for]
        for wish, token in zip(drawn_for, self._drawing.sample(logits, drawn_for, depths), strict=True):
            round_.add(wish.slot, token)
            if token is not None:
                self._tokens[wish.slot, self._fed[wish.slot].num_computed] = token

    def _record_hashes(self, wish: DraftRequest) -> None:
        fed = self._fed[wish.slot]
        tokens = self._tokens[wish.slot, : min(fed.num_computed, wish.num_tokens)]
        self._names.record(fed.named, self._table(wish.slot), tokens)

    def _table(self, slot: int) -> np.ndarray:
        return self._around.tables.ids[slot]


def _passes(spans: Sequence[TokenSpan], max_rows: int) -> Iterator[list[TokenSpan]]:
    """No span is longer than a pass."""
    some: list[TokenSpan] = []
    for span in spans:
        assert span.count <= max_rows, "a span fits into one pass"
        if sum(one.count for one in some) + span.count > max_rows:
            yield some
            some = []
        some.append(span)
    if some:
        yield some
