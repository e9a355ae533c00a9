"""Hides what was said in a recording: every token id is mapped through one random table, kept nowhere.

The table is one-to-one, so equal prompts stay equal, prefixes still hit and an end token still ends. Without the table
the text is gone, though not beyond a cryptanalyst: it is a substitution, and long texts have telling frequencies.
What is computed from true tokens and could be used to test a guess is left out: vectors become zeros, and names of blocks
become their places in the message.
"""

import hashlib
import random
import secrets
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from onward.proto.engine import KvEventsReply, Submit, TokenDelta, TokenDeltas
from onward.proto.handoff import PrefillDone, PrefillRequest
from onward.proto.reasoning_params import ReasoningParams
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import (
    AssignSlot,
    SlotAdvanced,
    SlotEmbedding,
    SlotEvent,
    SlotTokens,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

replace = msgspec.structs.replace
Message = TypeVar("Message")


class TokenAnonymizer:
    def __init__(self, vocab_size: int) -> None:
        self._table = list(range(vocab_size))
        random.Random(secrets.randbits(256)).shuffle(self._table)
        self._salt_key = secrets.token_bytes(16)

    def anonymize(self, message: Message) -> Message:
        """Returns a copy of the message with other token ids, and without the embeddings, grammars, cache salts and
        block hashes that would reveal text. Other messages are returned as they are."""
        match message:
            case Submit():
                return self._submit(message)  # type: ignore[return-value]
            case StepPlan(assign=[_, *_]):
                return replace(message, assign=[self._assign(assign) for assign in message.assign])
            case StepResult():
                return replace(message, events=[self._event(event) for event in message.events])
            case PrefillRequest():
                return self._prefill(message)  # type: ignore[return-value]
            case PrefillDone():
                return self._ready(message)  # type: ignore[return-value]
            case KvEventsReply():
                return anonymize_block_hashes(message)
            case TokenDeltas():
                return replace(message, deltas=[self._delta(delta) for delta in message.deltas])
            case _:
                return message

    def token_ids(self, token_ids: Sequence[int]) -> list[int]:
        # An id outside the vocabulary is no text, and stays: so the table stays one-to-one.
        table, size = self._table, len(self._table)
        return [table[token] if 0 <= token < size else token for token in token_ids]

    def _submit(self, message: Submit) -> Submit:
        return replace(
            message,
            prompt_token_ids=self.token_ids(message.prompt_token_ids),
            generated_token_ids=self.token_ids(message.generated_token_ids),
            sampling_params=self._sampling(message.sampling_params),
            cache_salt=self._cache_salt(message.cache_salt),
        )

    def _prefill(self, message: PrefillRequest) -> PrefillRequest:
        return replace(
            message,
            token_ids=self.token_ids(message.token_ids),
            sampling_params=self._sampling(message.sampling_params),
            cache_salt=self._cache_salt(message.cache_salt),
        )

    def _ready(self, message: PrefillDone) -> PrefillDone:
        return replace(
            message,
            token_ids=self.token_ids(message.token_ids),
            draft_token_ids=self.token_ids(message.draft_token_ids),
            logprobs=self._logprobs(message.logprobs),
            prompt_logprobs=self._logprobs(message.prompt_logprobs),
        )

    def _assign(self, assign: AssignSlot) -> AssignSlot:
        return replace(
            assign,
            token_ids=self.token_ids(assign.token_ids),
            sampling_params=self._sampling(assign.sampling_params),
            draft_token_ids=self.token_ids(assign.draft_token_ids),
        )

    def _sampling(self, sampling: SamplingParams) -> SamplingParams:
        return replace(
            sampling,
            end_token_ids=tuple(self.token_ids(sampling.end_token_ids)),
            logit_bias=tuple(self._weighted(sampling.logit_bias)),
            allowed_token_ids=tuple(self.token_ids(sampling.allowed_token_ids)),
            bad_words=tuple(tuple(self.token_ids(word)) for word in sampling.bad_words),
            grammar=None if sampling.grammar is None else replace(sampling.grammar, source=""),
            reasoning=None if sampling.reasoning is None else self._thinking(sampling.reasoning),
        )

    def _thinking(self, params: ReasoningParams) -> ReasoningParams:
        return replace(
            params,
            begin_token_ids=tuple(self.token_ids(params.begin_token_ids)),
            end_token_ids=tuple(self.token_ids(params.end_token_ids)),
            forced_prefix_token_ids=tuple(self.token_ids(params.forced_prefix_token_ids)),
        )

    def _event(self, event: SlotEvent) -> SlotEvent:
        match event:
            case SlotTokens():
                return replace(
                    event,
                    token_ids=self.token_ids(event.token_ids),
                    draft_token_ids=self.token_ids(event.draft_token_ids),
                    logprobs=self._logprobs(event.logprobs),
                    prompt_logprobs=self._logprobs(event.prompt_logprobs),
                )
            case SlotEmbedding():
                return replace(event, vector=_zeroed(event.vector))
            case SlotAdvanced(prompt_logprobs=[_, *_]):
                return replace(event, prompt_logprobs=self._logprobs(event.prompt_logprobs))
            case _:
                return event

    def _delta(self, delta: TokenDelta) -> TokenDelta:
        return replace(
            delta,
            token_ids=self.token_ids(delta.token_ids),
            logprobs=self._logprobs(delta.logprobs),
            prompt_logprobs=self._logprobs(delta.prompt_logprobs),
            rescored_logprobs=self._logprobs(delta.rescored_logprobs),
            embedding=None if delta.embedding is None else _zeroed(delta.embedding),
        )

    def _logprobs(self, logprobs: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
        if logprobs is None:
            return None
        return [replace(logprob, top=self._weighted(logprob.top)) for logprob in logprobs]

    def _weighted(self, pairs: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
        return list(zip(self.token_ids([token for token, _ in pairs]), [weight for _, weight in pairs], strict=True))

    def _cache_salt(self, cache_salt: str) -> str:
        """Returns a keyed hash of the salt, because a salt is a tenant's secret. Equal salts stay equal, and an empty
        one stays empty."""
        if not cache_salt:
            return ""
        return hashlib.blake2b(cache_salt.encode(), key=self._salt_key, digest_size=16).hexdigest()


def anonymize_block_hashes(message: Message) -> Message:
    """Returns a copy of the message in which each block hash is replaced by the index of its first occurrence. A block
    hash covers the tokens up to its block, so a reader could confirm a guessed prompt by hashing it."""
    if not isinstance(message, KvEventsReply):
        return message
    block_numbers: dict[bytes, bytes] = {}
    changes = [
        (known, block_numbers.setdefault(name, len(block_numbers).to_bytes(4, "big")))
        for known, name in message.events.changes
    ]
    return replace(message, events=replace(message.events, changes=changes))


def _zeroed(vector: bytes) -> bytes:
    return bytes(len(vector))
