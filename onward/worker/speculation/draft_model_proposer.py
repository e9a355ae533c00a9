"""Drafts by a small model of the same vocabulary, with KV of its own under the served model's block ids.

It computes KV only when drafts are requested. So a request without drafts costs nothing, and a first token never waits
for the draft model. Missing tokens (a whole prompt, or the few since the last call) are computed in pieces, because
every stream of the step waits for them. A slot gets no drafts until all its tokens are computed.

    the slot's list    |-------------------------------------------|
                       0                                       num_tokens
    computed tokens    |------------------------|·· drafts ··|        only those that equal the list count
                       0                               num_computed
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onward.config import WorkerConfig
from onward.errors import StartupError
from onward.models.decoder import build_decoder
from onward.models.device_support import check_supported, device_kind
from onward.models.head_padding import pad_for_cpu
from onward.models.layers.paged_kv import kv_dtype
from onward.models.loader.model_store import prepare
from onward.models.loader.weights import open_weights
from onward.proto.model import PreparedModel
from onward.text.tokenizer import Tokenizer
from onward.worker import kv_pool
from onward.worker.batch_builder import BatchBuilder
from onward.worker.speculation import draft_cost
from onward.worker.speculation.draft_block_hashes import DraftBlockHashes, HashedPrefix
from onward.worker.speculation.draft_round import DraftRound
from onward.worker.speculation.draft_sampler import DraftSampler
from onward.worker.speculation.proposer import ComputedSpan, DraftRequest, ProposerContext
from onward.worker.token_span import TokenSpan, unowned_span

MIN_CATCH_UP_TOKENS = 16
"""Tokens that each slot may compute in a round, whatever the others need. Mostly more than a step adds to its list, so
that every slot catches up."""


@dataclass(slots=True)
class _SlotProgress:
    """Progress of one slot."""

    num_computed: int = 0
    """Leading tokens of its row of `_tokens` that have KV."""
    num_listed: int = 0
    """Leading tokens of that row that come from the slot's list."""
    hashed_prefix: HashedPrefix = field(default_factory=HashedPrefix)


class DraftModelProposer:
    def __init__(self, model: PreparedModel, weights: Mapping[str, Any], context: ProposerContext) -> None:
        config, num_slots = model.config, context.config.max_num_seqs
        self._context, self._vocab_size = context, config.vocab_size
        self._max_rows = max(context.config.max_num_batched_tokens, num_slots, MIN_CATCH_UP_TOKENS)
        self._tokens = np.zeros_like(context.tokens)
        self._progress = [_SlotProgress() for _ in range(num_slots)]
        self._block_hashes = DraftBlockHashes(context.num_blocks, context.config.block_size)
        dtype = kv_dtype(config, model.quantization)
        self._kv = kv_pool.allocate_kv_pool(config, dtype, context.num_blocks, context.config.block_size)
        self._batch = BatchBuilder(config, self._tokens, context.tables, context.config.block_size, self._max_rows)
        self._draft_sampler = DraftSampler(config.vocab_size, num_slots, context.threads)
        self._decoder = build_decoder(
            model,
            weights,
            self._kv.kv,
            max_model_len=context.max_model_len,
            max_rows=self._max_rows,
            max_sampled=num_slots,
            threads=context.threads,
        )
        self._decoder.forward(
            self._batch.build([unowned_span(0, 0, 1, is_sampled=True)])
        )  # compiles, and touches every weight

    def on_assign(self, slot: int, num_tokens: int, num_computed: int) -> None:
        self._draft_sampler.on_assign(slot)
        self._copy(slot, 0, num_tokens)
        prefix = self._block_hashes.match_prefix(self._table(slot), self._tokens[slot, :num_computed])
        self._progress[slot] = _SlotProgress(prefix.count * self._context.config.block_size, num_tokens, prefix)

    def on_computed(self, spans: Sequence[ComputedSpan], outputs: Callable[[], np.ndarray]) -> None:
        """Does nothing: a draft model does not use the served model's outputs."""

    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        round_ = DraftRound(draft_requests, self._context.max_model_len)
        requested = [draft_request for draft_request in draft_requests if draft_request.num_drafts > 0]
        for draft_request in requested:
            self._sync_tokens(draft_request)
        self._draft_sampler.begin(requested, self._tokens)
        for spans in _passes(self._catch_up_spans(requested), self._max_rows):
            self._compute(spans, round_)
        for draft_request in requested:
            self._record_hashes(draft_request)
        while spans := [
            unowned_span(slot, self._progress[slot].num_computed, 1, is_sampled=True) for slot in round_.active_slots
        ]:
            self._compute(spans, round_)
        return [round_.drafts[draft_request.slot] for draft_request in draft_requests]

    def _sync_tokens(self, draft_request: DraftRequest) -> None:
        """Copies new tokens of the list, and keeps the KV of drafts that equal them. The last token is always computed
        by the next pass, because its logits give the first draft."""
        progress = self._progress[draft_request.slot]
        assert progress.num_listed <= draft_request.num_tokens, "the token list of a request only grows"
        start, end = progress.num_listed, min(progress.num_computed, draft_request.num_tokens)
        drafted = self._tokens[draft_request.slot, start:end].copy()
        self._copy(draft_request.slot, start, draft_request.num_tokens)
        mismatches = np.flatnonzero(drafted != self._tokens[draft_request.slot, start:end])
        num_matching = start + int(mismatches[0]) if len(mismatches) else progress.num_computed
        progress.num_computed, progress.num_listed = (
            min(num_matching, draft_request.num_tokens - 1),
            draft_request.num_tokens,
        )

    def _copy(self, slot: int, start: int, end: int) -> None:
        """Copies tokens of the slot's list, within the draft model's vocabulary: models of one vocabulary may be padded
        to different sizes."""
        np.minimum(self._context.tokens[slot, start:end], self._vocab_size - 1, out=self._tokens[slot, start:end])

    def _catch_up_spans(self, draft_requests: Sequence[DraftRequest]) -> list[TokenSpan[None]]:
        rows_left, spans = self._max_rows, []
        for draft_request in draft_requests:
            start = self._progress[draft_request.slot].num_computed
            count = min(draft_request.num_tokens - start, max(MIN_CATCH_UP_TOKENS, rows_left))
            rows_left -= count
            spans.append(
                unowned_span(draft_request.slot, start, count, is_sampled=start + count == draft_request.num_tokens)
            )
        return spans

    def _compute(self, spans: Sequence[TokenSpan[None]], round_: DraftRound) -> None:
        for span in spans:
            assert span.start == self._progress[span.slot].num_computed, (
                "a span starts where the slot's computed tokens end"
            )
            self._block_hashes.invalidate(self._table(span.slot), span.start, span.start + span.count)
        logits = self._decoder.forward(self._batch.build(spans))
        for span in spans:
            self._progress[span.slot].num_computed = span.start + span.count
        sampled_requests = [round_.draft_requests[span.slot] for span in spans if span.is_sampled]
        if not sampled_requests:
            return
        depths = [len(round_.drafts[draft_request.slot]) for draft_request in sampled_requests]
        for draft_request, token in zip(
            sampled_requests, self._draft_sampler.sample(logits, sampled_requests, depths), strict=True
        ):
            round_.add(draft_request.slot, token)
            if token is not None:
                self._tokens[draft_request.slot, self._progress[draft_request.slot].num_computed] = token

    def _record_hashes(self, draft_request: DraftRequest) -> None:
        progress = self._progress[draft_request.slot]
        tokens = self._tokens[draft_request.slot, : min(progress.num_computed, draft_request.num_tokens)]
        self._block_hashes.record(progress.hashed_prefix, self._table(draft_request.slot), tokens)

    def _table(self, slot: int) -> np.ndarray:
        return self._context.tables.ids[slot]


def _passes(spans: Sequence[TokenSpan[None]], max_rows: int) -> Iterator[list[TokenSpan[None]]]:
    """Groups spans into passes of at most `max_rows` rows. No span is longer than a pass."""
    batch: list[TokenSpan[None]] = []
    for span in spans:
        assert span.count <= max_rows, "a span fits into one pass"
        if sum(queued.count for queued in batch) + span.count > max_rows:
            yield batch
            batch = []
        batch.append(span)
    if batch:
        yield batch


class DraftModelProposerFactory:
    """A draft model before it has memory. `create` compares its vocabulary with the served model's."""

    def __init__(self, model: PreparedModel, weights: Mapping[str, Any], config: WorkerConfig, path: str) -> None:
        """`path` is the draft model's path as the flag has it."""
        self._model, self._weights = pad_for_cpu(model, weights)
        self._path = path
        self._block_size = config.block_size
        self._draft_cost = 0.0

    @property
    def bytes_per_block(self) -> int:
        dtype = kv_dtype(self._model.config, self._model.quantization)
        return kv_pool.block_bytes(self._model.config, dtype, self._block_size)

    @property
    def draft_cost(self) -> float:
        """Set by `create`; 0 before that."""
        return self._draft_cost

    def create(self, context: ProposerContext) -> DraftModelProposer:
        if difference := vocabulary_difference(self._model, context.model):
            raise StartupError(
                f"--speculative draft:{self._path}: {difference}; a model that drafts must have the served one's vocabulary"
            )
        self._draft_cost = draft_cost.of_model(self._model.config, context.model.config)
        return DraftModelProposer(self._model, self._weights, context)


def create_draft_model_factory(path: str, config: WorkerConfig) -> DraftModelProposerFactory:
    try:
        model = _prepare(path)
        return DraftModelProposerFactory(model, open_weights(model), config, path)
    except StartupError as error:
        raise StartupError(f"--speculative draft:{path}: {error.message}") from None


def _prepare(path: str) -> PreparedModel:
    """Prepares the draft model, quantized to int8 if its sizes allow that. The loss only makes drafts a little
    worse."""
    try:
        model = prepare(path, quantization="int8")
        check_supported(model.config, device_kind("cpu", model.quantization))
        return model
    except StartupError as first:
        try:
            return prepare(path, quantization="none")
        except StartupError:
            raise first from None


def vocabulary_difference(draft: PreparedModel, served: PreparedModel) -> str | None:
    """Returns how the two vocabularies differ, or None. If both models have a tokenizer, the sizes are not compared:
    models of a family may be padded to different sizes and have further special tokens."""
    if draft.tokenizer is None or served.tokenizer is None:
        ours, theirs = draft.config.vocab_size, served.config.vocab_size
        return None if ours == theirs else f"its vocabulary has {ours} tokens, the served model's {theirs}"
    files = [Path(model.folder) / name for model, name in ((draft, draft.tokenizer), (served, served.tokenizer))]
    if files[0] == files[1]:
        return None
    ours, theirs = (Tokenizer.from_file(file).table.token_bytes_list for file in files)
    for token_id, (draft_token, served_token) in enumerate(zip(ours, theirs, strict=False)):
        if draft_token != served_token:
            return f"token {token_id} is {draft_token!r} to it, and {served_token!r} to the served model"
    return None
