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

from onward.layers.paged_kv import kv_dtype
from onward.models.decoder import build_decoder
from onward.proto.model import PreparedModel
from onward.worker import kv_store
from onward.worker.batch import BatchBuilder, Span
from onward.worker.speculation.block_names import BlockNames, NamedBlocks
from onward.worker.speculation.draft_drawing import DraftDrawing
from onward.worker.speculation.drafting_round import Round
from onward.worker.speculation.proposer import ComputedSpan, Surroundings, Wish

ALWAYS_CAUGHT_UP = 16
"""Tokens that each slot may compute in a round, whatever the others need: more than a step adds to its list, mostly, so
that everybody gets through."""


@dataclass(slots=True)
class _Fed:
    """Of one slot."""

    num_fed: int = 0
    """Leading tokens of its row of `_tokens` that have KV."""
    num_listed: int = 0
    """Leading tokens of that row that are the slot's list."""
    named: NamedBlocks = field(default_factory=NamedBlocks)


class DraftModel:
    def __init__(self, model: PreparedModel, weights: Mapping[str, Any], around: Surroundings) -> None:
        config, slots = model.config, around.config.max_num_seqs
        self._around, self._vocab_size = around, config.vocab_size
        self._max_rows = max(around.config.max_num_batched_tokens, slots, ALWAYS_CAUGHT_UP)
        self._tokens = np.zeros_like(around.tokens)
        self._fed = [_Fed() for _ in range(slots)]
        self._names = BlockNames(around.num_blocks, around.config.block_size)
        dtype = kv_dtype(config, model.quantization)
        self._kv = kv_store.allocate(config, dtype, around.num_blocks, around.config.block_size)
        self._batch = BatchBuilder(config, self._tokens, around.tables, around.config.block_size, self._max_rows)
        self._drawing = DraftDrawing(config.vocab_size, slots, around.threads)
        self._decoder = build_decoder(
            model,
            weights,
            self._kv.kv,
            max_model_len=around.max_model_len,
            max_rows=self._max_rows,
            max_sampled=slots,
            threads=around.threads,
        )
        self._decoder.forward(self._batch.build([Span(0, 0, 1, samples=True)]))  # compiles, and touches every weight

    def assigned(self, slot: int, num_tokens: int, num_computed: int) -> None:
        self._drawing.assigned(slot)
        self._copy(slot, 0, num_tokens)
        named = self._names.find(self._table(slot), self._tokens[slot, :num_computed])
        self._fed[slot] = _Fed(named.count * self._around.config.block_size, num_tokens, named)

    def computed(self, spans: Sequence[ComputedSpan], outputs: Callable[[], np.ndarray]) -> None:
        """What the served model computes is of no use here."""

    def propose(self, wishes: Sequence[Wish]) -> list[list[int]]:
        round_ = Round(wishes, self._around.max_model_len)
        wanted = [wish for wish in wishes if wish.num_drafts > 0]
        for wish in wanted:
            self._take_list(wish)
        self._drawing.begin(wanted, self._tokens)
        for spans in _passes(self._missing(wanted), self._max_rows):
            self._compute(spans, round_)
        for wish in wanted:
            self._give_names(wish)
        while spans := [Span(slot, self._fed[slot].num_fed, 1, samples=True) for slot in round_.going]:
            self._compute(spans, round_)
        return [round_.drafts[wish.slot] for wish in wishes]

    def _take_list(self, wish: Wish) -> None:
        """Drafts that were not accepted count no more; the last token is computed anyhow, to know what follows it."""
        fed = self._fed[wish.slot]
        start, end = fed.num_listed, min(fed.num_fed, wish.num_tokens)
        guessed = self._tokens[wish.slot, start:end].copy()
        self._copy(wish.slot, start, wish.num_tokens)
        wrong = np.flatnonzero(guessed != self._tokens[wish.slot, start:end])
        right = start + int(wrong[0]) if len(wrong) else fed.num_fed
        fed.num_fed, fed.num_listed = min(right, wish.num_tokens - 1), wish.num_tokens

    def _copy(self, slot: int, start: int, end: int) -> None:
        """Models of one vocabulary may still be padded to different sizes."""
        np.minimum(self._around.tokens[slot, start:end], self._vocab_size - 1, out=self._tokens[slot, start:end])

    def _missing(self, wishes: Sequence[Wish]) -> list[Span]:
        left, spans = self._max_rows, []
        for wish in wishes:
            start = self._fed[wish.slot].num_fed
            count = min(wish.num_tokens - start, max(ALWAYS_CAUGHT_UP, left))
            left -= count
            spans.append(Span(wish.slot, start, count, samples=start + count == wish.num_tokens))
        return spans

    def _compute(self, spans: Sequence[Span], round_: Round) -> None:
        for span in spans:
            self._names.forget(self._table(span.slot), span.start, span.start + span.count)
        logits = self._decoder.forward(self._batch.build(spans))
        for span in spans:
            self._fed[span.slot].num_fed = span.start + span.count
        drawn_for = [round_.wishes[span.slot] for span in spans if span.samples]
        if not drawn_for:
            return
        depths = [len(round_.drafts[wish.slot]) for wish in drawn_for]
        for wish, token in zip(drawn_for, self._drawing.draw(logits, drawn_for, depths), strict=True):
            round_.take(wish.slot, token)
            if token is not None:
                self._tokens[wish.slot, self._fed[wish.slot].num_fed] = token

    def _give_names(self, wish: Wish) -> None:
        fed = self._fed[wish.slot]
        tokens = self._tokens[wish.slot, : min(fed.num_fed, wish.num_tokens)]
        self._names.give(fed.named, self._table(wish.slot), tokens)

    def _table(self, slot: int) -> np.ndarray:
        return self._around.tables.ids[slot]


def _passes(spans: Sequence[Span], max_rows: int) -> Iterator[list[Span]]:
    """No span is longer than a pass."""
    some: list[Span] = []
    for span in spans:
        if sum(one.count for one in some) + span.count > max_rows:
            yield some
            some = []
        some.append(span)
    if some:
        yield some
