"""Drafts by EAGLE's layer: from the served model's last hidden states, through its embedding and its head.

A pair is a position's hidden state (what the head reads) with the token behind it, and what the layer makes of it guesses
the token after that. Pairs are computed as soon as both are known, behind each pass of the served model, and their keys
and values stay in one layer of KV under the served model's block ids.

    tokens     t0  t1  t2 ... t(N-2)  t(N-1)          N known; the served model has hidden states up to h(N-2)
    hidden     h0  h1  h2 ... h(N-2)
    pair i     (hi, t(i+1)), at position i: its output guesses t(i+2), so pair N-2 gives the first draft

Drafts behind the first take the layer's own output for the hidden state that nobody knows yet. Where the KV of a slot came
from a peer there are no hidden states of it, and such a slot gets no drafts. A pair at the end of a cached block may have
been made with another request's next token: one guess among many, and never more than a guess.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onward.config import WorkerConfig
from onward.errors import StartupError
from onward.models.decoder import build_rotary, check_supported
from onward.models.layers.embedding_and_head import open_embedding_and_head
from onward.models.layers.paged_kv import AttentionScratch
from onward.models.loader.eagle_head import EagleHead, read_eagle_head
from onward.models.loader.weights import open_weights
from onward.proto.model import ModelConfig
from onward.proto.speculative_config import MAX_DRAFT_TOKENS
from onward.worker import kv_pool
from onward.worker.batch_builder import BatchBuilder, TokenSpan
from onward.worker.speculation import draft_cost
from onward.worker.speculation.draft_block_hashes import DraftBlockHashes, HashedPrefix
from onward.worker.speculation.draft_round import DraftRound
from onward.worker.speculation.draft_sampler import DraftSampler
from onward.worker.speculation.proposer import ComputedSpan, DraftRequest, ProposerContext

_KV_DTYPE = np.dtype(np.float32)


@dataclass(slots=True)
class _SlotPairs:
    """Of one slot."""

    num_pairs: int | None = None
    """Leading positions whose pairs are computed. None: some are missing and will never be known."""
    named: HashedPrefix = field(default_factory=HashedPrefix)


class EagleProposerFactory:
    def __init__(
        self, head: EagleHead, config: WorkerConfig, path: str, target_weights: Mapping[str, Any] | None = None
    ) -> None:
        """`path` is what the flag said. Without `target_weights` they are opened where the served model lies."""
        self._head, self._path, self._target_weights = head, path, target_weights
        self._block_size = config.block_size
        self._draft_cost = 0.0

    @property
    def bytes_per_block(self) -> int:
        return kv_pool.block_bytes(self._head.config, _KV_DTYPE, self._block_size)

    @property
    def draft_cost(self) -> float:
        """Known once it is open."""
        return self._draft_cost

    def create(self, surroundings: ProposerContext) -> "EagleProposer":
        served = surroundings.model
        _check_fits(self._head.config, served.config, self._path)
        self._draft_cost = draft_cost.of_float_layer(
            self._head.config, served.config, served_is_int8=served.quantization == "int8"
        )
        weights = open_weights(served) if self._target_weights is None else self._target_weights
        return EagleProposer(self._head, weights, surroundings)


def create_eagle_factory(path: str, config: WorkerConfig) -> EagleProposerFactory:
    try:
        head = read_eagle_head(Path(path).expanduser())
        check_supported(head.config, "none")
    except StartupError as error:
        raise StartupError(f"--speculative eagle:{path}: {error.message}") from None
    return EagleProposerFactory(head, config, path)


def _check_fits(own: ModelConfig, served: ModelConfig, path: str) -> None:
    for name in ("hidden_size", "vocab_size"):
        if (ours := getattr(own, name)) != (theirs := getattr(served, name)):
            raise StartupError(
                f"--speculative eagle:{path}: its {name} is {ours}, the served model's {theirs}; it is another model's"
            )


class EagleProposer:
    def __init__(self, head: EagleHead, weights: Mapping[str, Any], around: ProposerContext) -> None:
        slots, block_size = around.config.max_num_seqs, around.config.block_size
        max_rows = around.config.max_num_batched_tokens + slots * (1 + MAX_DRAFT_TOKENS)
        self._around = around
        self._pairs = [_SlotPairs() for _ in range(slots)]
        self._outputs = np.zeros((slots, head.config.hidden_size), np.float32)
        """Of each slot's last pair."""
        self._names = DraftBlockHashes(around.num_blocks, block_size)
        self._kv = kv_pool.allocate_kv_pool(head.config, _KV_DTYPE, around.num_blocks, block_size)
        self._batch = BatchBuilder(head.config, around.tokens, around.tables, block_size, max_rows)
        self._ends = open_embedding_and_head(
            around.model, weights, around.threads, max_embedded=max_rows, max_logits=slots
        )
        self._drawing = DraftSampler(around.model.config.vocab_size, slots, around.threads)
        self._layer = _build_layer(head, self._kv.kv, around)

    def on_assign(self, slot: int, num_tokens: int, num_computed: int) -> None:
        self._drawing.on_assign(slot)
        named = self._names.match_prefix(self._around.tables.ids[slot], self._around.tokens[slot, :num_computed])
        is_whole = named.count * self._around.config.block_size == num_computed
        self._pairs[slot] = _SlotPairs(num_computed if is_whole else None, named)

    def on_computed(self, spans: Sequence[ComputedSpan], outputs: Callable[[], np.ndarray]) -> None:
        known = [span for span in map(self._with_tokens_behind, spans) if span.count and self._has_all_pairs(span)]
        if not known:
            return
        rows = np.concatenate([np.arange(span.first_row, span.first_row + span.count) for span in known])
        tokens = [self._around.tokens[s.slot, s.start + 1 : s.start + s.count + 1] for s in known]
        own = [TokenSpan(span.slot, span.start, span.count, is_sampled=False) for span in known]
        made = self._compute(own, np.concatenate(tokens), outputs()[rows])
        last = -1
        for span in known:
            last += span.count
            self._outputs[span.slot] = made[last]
            self._advance(span)
        assert last == len(made) - 1, "the layer returns one row for each pair"

    def propose(self, wishes: Sequence[DraftRequest]) -> list[list[int]]:
        ready = [wish for wish in wishes if wish.num_drafts > 0 and self._is_ready(wish)]
        round_ = DraftRound(wishes, self._around.max_model_len)
        self._drawing.begin(ready, self._around.tokens)
        hidden = self._outputs[[wish.slot for wish in ready]]
        while ready:
            hidden = self._draft(ready, hidden, round_)
            ready = [round_.wishes[slot] for slot in round_.active_slots]
        return [round_.drafts[wish.slot] for wish in wishes]

    def _is_ready(self, wish: DraftRequest) -> bool:
        return self._pairs[wish.slot].num_pairs == wish.num_tokens - 1

    def _draft(self, wishes: Sequence[DraftRequest], hidden: np.ndarray, round_: DraftRound) -> np.ndarray:
        """One more for each wish. What the layer makes of it, for those who go on."""
        assert len(hidden) == len(wishes), "every draft request has one hidden state"
        depths = [len(round_.drafts[wish.slot]) for wish in wishes]
        drawn = self._drawing.sample(self._ends.logits(hidden), wishes, depths)
        for wish, token in zip(wishes, drawn, strict=True):
            round_.add(wish.slot, token)
        going = set(round_.active_slots)
        kept = [row for row, wish in enumerate(wishes) if wish.slot in going]
        if not kept:
            return hidden[:0]
        # The first draft, at position num_tokens, makes a pair of the position before it.
        spans = [
            TokenSpan(wishes[row].slot, wishes[row].num_tokens - 1 + depths[row], 1, is_sampled=False) for row in kept
        ]
        return self._compute(spans, np.array([drawn[row] for row in kept], np.int32), hidden[kept])

    def _compute(self, spans: Sequence[TokenSpan], token_ids: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        for span in spans:
            self._names.invalidate(self._around.tables.ids[span.slot], span.start, span.start + span.count)
        return self._layer(self._ends.embed(token_ids), hidden, self._batch.build(spans))

    @staticmethod
    def _with_tokens_behind(span: ComputedSpan) -> ComputedSpan:
        """Without a last token that nothing follows yet."""
        count = min(span.count, span.num_tokens - 1 - span.start)
        return ComputedSpan(span.slot, span.start, count, span.first_row, span.num_tokens)

    def _has_all_pairs(self, span: ComputedSpan) -> bool:
        pairs = self._pairs[span.slot]
        if pairs.num_pairs is not None and span.start > pairs.num_pairs:
            pairs.num_pairs = None
        return pairs.num_pairs is not None

    def _advance(self, span: ComputedSpan) -> None:
        pairs, end = self._pairs[span.slot], span.start + span.count
        assert pairs.num_pairs is not None, "pairs are computed only for slots that have all earlier ones"
        pairs.num_pairs = end
        self._names.record(pairs.named, self._around.tables.ids[span.slot], self._around.tokens[span.slot, :end])


def _build_layer(head: EagleHead, kv: Any, around: ProposerContext) -> Any:
    """torch is imported only where somebody drafts in this way."""
    import torch

    from onward.models.layers.eagle_layer import EagleLayer
    from onward.models.layers.float_layers import Attention

    torch.set_num_threads(around.threads.size)
    scratch = AttentionScratch.allocate(head.config, around.max_model_len, around.threads.size)
    rotary = build_rotary(head.config, around.max_model_len)
    return EagleLayer(head.tensors, head.config, Attention(head.config, rotary, kv, scratch, around.threads))
