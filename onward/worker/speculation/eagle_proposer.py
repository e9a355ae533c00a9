"""Drafts by EAGLE's layer, from the served model's last hidden states, with its embedding and its head.

A pair is a position's hidden state (which the head reads) and the token after it. The layer's output for a pair
predicts the token after that. Pairs are computed as soon as both parts are known, after each pass of the served model.
Their keys and values stay in one layer of KV under the served model's block ids.

    tokens     t0  t1  t2 ... t(N-2)  t(N-1)          N known; the served model has hidden states up to h(N-2)
    hidden     h0  h1  h2 ... h(N-2)
    pair i     (hi, t(i+1)), at position i: its output predicts t(i+2), so pair N-2 gives the first draft

Drafts after the first use the layer's own output in place of the hidden state, which is not known yet. If the KV of a
slot came from a peer, there are no hidden states for it, and the slot gets no drafts. A pair at the end of a cached
block may have been computed with another request's next token. That can only make a draft wrong.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onward.config import WorkerConfig
from onward.errors import StartupError
from onward.models.device_support import check_supported
from onward.models.layers.embedding_and_head import open_embedding_and_head
from onward.models.layers.paged_kv import AttentionScratch
from onward.models.layers.rotary_table import RotaryTables
from onward.models.loader.eagle_head import EagleHead, read_eagle_head
from onward.models.loader.weights import open_weights
from onward.proto.model import ModelConfig
from onward.proto.speculative_config import MAX_DRAFT_TOKENS
from onward.worker import kv_pool
from onward.worker.batch_builder import BatchBuilder
from onward.worker.speculation import draft_cost
from onward.worker.speculation.draft_block_hashes import DraftBlockHashes, HashedPrefix
from onward.worker.speculation.draft_round import DraftRound
from onward.worker.speculation.draft_sampler import DraftSampler
from onward.worker.speculation.proposer import ComputedSpan, DraftRequest, ProposerContext
from onward.worker.token_span import TokenSpan, unowned_span

_KV_DTYPE = np.dtype(np.float32)


@dataclass(slots=True)
class _SlotPairs:
    """The computed pairs of one slot."""

    num_pairs: int | None = None
    """Leading positions whose pairs are computed. None: some are missing and can never be computed."""
    hashed_prefix: HashedPrefix = field(default_factory=HashedPrefix)


class EagleProposerFactory:
    def __init__(
        self, head: EagleHead, config: WorkerConfig, path: str, target_weights: Mapping[str, Any] | None = None
    ) -> None:
        """`path` is the head's path as the flag has it. Without `target_weights`, the served model's weights are
        opened."""
        self._head, self._path, self._target_weights = head, path, target_weights
        self._block_size = config.block_size
        self._draft_cost = 0.0

    @property
    def bytes_per_block(self) -> int:
        return kv_pool.block_bytes(self._head.config, _KV_DTYPE, self._block_size)

    @property
    def draft_cost(self) -> float:
        """Set by `create`; 0 before that."""
        return self._draft_cost

    def create(self, context: ProposerContext) -> "EagleProposer":
        served = context.model
        _check_fits(self._head.config, served.config, self._path)
        self._draft_cost = draft_cost.of_float_layer(
            self._head.config, served.config, served_is_int8=served.quantization == "int8"
        )
        weights = open_weights(served) if self._target_weights is None else self._target_weights
        return EagleProposer(self._head, weights, context)


def create_eagle_factory(path: str, config: WorkerConfig) -> EagleProposerFactory:
    try:
        head = read_eagle_head(Path(path).expanduser())
        check_supported(head.config, "eagle")
    except StartupError as error:
        raise StartupError(f"--speculative eagle:{path}: {error.message}") from None
    return EagleProposerFactory(head, config, path)


def _check_fits(own: ModelConfig, served: ModelConfig, path: str) -> None:
    try:
        check_supported(served, "eagle")
    except StartupError as error:
        raise StartupError(f"--speculative eagle:{path}: {error.message}") from None
    for name in ("hidden_size", "vocab_size"):
        if (value := getattr(own, name)) != (served_value := getattr(served, name)):
            raise StartupError(
                f"--speculative eagle:{path}: its {name} is {value}, the served model's {served_value}; "
                "it is another model's"
            )


class EagleProposer:
    def __init__(self, head: EagleHead, weights: Mapping[str, Any], context: ProposerContext) -> None:
        num_slots, block_size = context.config.max_num_seqs, context.config.block_size
        max_rows = context.config.max_num_batched_tokens + num_slots * (1 + MAX_DRAFT_TOKENS)
        self._context = context
        self._pairs = [_SlotPairs() for _ in range(num_slots)]
        self._outputs = np.zeros((num_slots, head.config.hidden_size), np.float32)
        """The layer's output for each slot's last pair."""
        self._block_hashes = DraftBlockHashes(context.num_blocks, block_size)
        self._kv = kv_pool.allocate_kv_pool(head.config, _KV_DTYPE, context.num_blocks, block_size)
        self._batch = BatchBuilder(head.config, context.tokens, context.tables, block_size, max_rows)
        self._embedding_and_head = open_embedding_and_head(
            context.model, weights, context.threads, max_embedded=max_rows, max_logits=num_slots
        )
        self._draft_sampler = DraftSampler(context.model.config.vocab_size, num_slots, context.threads)
        self._layer = _build_layer(head, self._kv.kv, context)

    def on_assign(self, slot: int, num_tokens: int, num_computed: int) -> None:
        self._draft_sampler.on_assign(slot)
        prefix = self._block_hashes.match_prefix(
            self._context.tables.ids[slot], self._context.tokens[slot, :num_computed]
        )
        is_whole = prefix.count * self._context.config.block_size == num_computed
        self._pairs[slot] = _SlotPairs(num_computed if is_whole else None, prefix)

    def on_computed(self, spans: Sequence[ComputedSpan], outputs: Callable[[], np.ndarray]) -> None:
        known = [span for span in map(self._with_known_next_tokens, spans) if span.count and self._has_all_pairs(span)]
        if not known:
            return
        rows = np.concatenate([np.arange(span.first_row, span.first_row + span.count) for span in known])
        tokens = [self._context.tokens[span.slot, span.start + 1 : span.start + span.count + 1] for span in known]
        pair_spans = [unowned_span(span.slot, span.start, span.count, is_sampled=False) for span in known]
        outputs_of_pairs = self._compute(pair_spans, np.concatenate(tokens), outputs()[rows])
        last = -1
        for span in known:
            last += span.count
            self._outputs[span.slot] = outputs_of_pairs[last]
            self._advance(span)
        assert last == len(outputs_of_pairs) - 1, "the layer returns one row for each pair"

    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        ready = [
            draft_request
            for draft_request in draft_requests
            if draft_request.num_drafts > 0 and self._is_ready(draft_request)
        ]
        round_ = DraftRound(draft_requests, self._context.max_model_len)
        self._draft_sampler.begin(ready, self._context.tokens)
        hidden = self._outputs[[draft_request.slot for draft_request in ready]]
        while ready:
            hidden = self._draft(ready, hidden, round_)
            ready = [round_.draft_requests[slot] for slot in round_.active_slots]
        return [round_.drafts[draft_request.slot] for draft_request in draft_requests]

    def _is_ready(self, draft_request: DraftRequest) -> bool:
        return self._pairs[draft_request.slot].num_pairs == draft_request.num_tokens - 1

    def _draft(self, draft_requests: Sequence[DraftRequest], hidden: np.ndarray, round_: DraftRound) -> np.ndarray:
        """Adds one draft for each request. Returns the layer's outputs of the slots that are still active."""
        assert len(hidden) == len(draft_requests), "every draft request has one hidden state"
        depths = [len(round_.drafts[draft_request.slot]) for draft_request in draft_requests]
        sampled = self._draft_sampler.sample(self._embedding_and_head.logits(hidden), draft_requests, depths)
        for draft_request, token in zip(draft_requests, sampled, strict=True):
            round_.add(draft_request.slot, token)
        active = set(round_.active_slots)
        kept = [row for row, draft_request in enumerate(draft_requests) if draft_request.slot in active]
        if not kept:
            return hidden[:0]
        # The first draft, at position num_tokens, makes a pair with the hidden state of the position before it.
        spans = [
            unowned_span(
                draft_requests[row].slot, draft_requests[row].num_tokens - 1 + depths[row], 1, is_sampled=False
            )
            for row in kept
        ]
        return self._compute(spans, np.array([sampled[row] for row in kept], np.int32), hidden[kept])

    def _compute(self, spans: Sequence[TokenSpan[None]], token_ids: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        for span in spans:
            self._block_hashes.invalidate(self._context.tables.ids[span.slot], span.start, span.start + span.count)
        return self._layer(self._embedding_and_head.embed(token_ids), hidden, self._batch.build(spans))

    @staticmethod
    def _with_known_next_tokens(span: ComputedSpan) -> ComputedSpan:
        """Returns the part of the span whose tokens have a known next token. EAGLE pairs each hidden state with the
        next token, so the last known token has no pair yet."""
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
        self._block_hashes.record(
            pairs.hashed_prefix, self._context.tables.ids[span.slot], self._context.tokens[span.slot, :end]
        )


def _build_layer(head: EagleHead, kv: Any, context: ProposerContext) -> Any:
    """Builds EAGLE's layer. torch is imported only here, so that workers without EAGLE do not load it."""
    import torch

    from onward.models.layers.eagle_layer import EagleLayer
    from onward.models.layers.float_layers import Attention

    torch.set_num_threads(context.threads.size)
    scratch = AttentionScratch.allocate(head.config, context.max_model_len, context.threads.size)
    rotary = RotaryTables.build(head.config, context.max_model_len)
    return EagleLayer(head.tensors, head.config, Attention(head.config, rotary, kv, scratch, context.threads))
