"""A worker whose model is a hash: the next token is a hash of the whole history *as read back from its KV memory*.

Each of these errors changes the output at once: a lost, repeated, stale or overwritten cell, a wrong block table, a
prefix hit on the wrong block, or a sampling field that a wire dropped. `expected_output` returns the correct output.
The worker takes plans and returns results like any other worker, and fails a request on demand.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from onward.grammar.lazy import LazyGrammarCompiler
from onward.grammar.matcher import GrammarMatcher, TokenBitmask
from onward.proto import SCHEMA_VERSION
from onward.proto.kv_transfer import KvEndpoint, KvLayout
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import (
    AssignSlot,
    PreemptSlot,
    RunSlot,
    SlotAdvanced,
    SlotEmbedding,
    SlotEvent,
    SlotFailed,
    SlotPreempted,
    SlotTokens,
    StepPlan,
    StepResult,
    TokenLogprobs,
    WorkerHello,
)
from onward.sim.kv_transfer import SimKvTransfer
from onward.sim.seeded_random import SeededRandom
from onward.worker.logits_processors.mask_executor import NextMask, compute_inline
from onward.worker.logits_processors.slot_grammar import SlotGrammar, SlotGrammarError

RIGHT_RATE = 170 / 256
_NONE_RATE = 30 / 256


class HashDraftProposer:
    """Proposes drafts for a simulated worker: right and wrong tokens at random, or none. The drafts depend only on the
    seed and the history, so that a run can be repeated."""

    def __init__(self, seed: int) -> None:
        self._seed = seed.to_bytes(8, "little")

    def propose(self, history: bytes, count: int, follow: Callable[[list[int]], int], vocab_size: int) -> list[int]:
        """Returns up to `count` drafts. `follow` returns the correct token after the history and the given drafts."""
        key = hashlib.blake2b(history, digest_size=16, key=self._seed).digest()
        draws = [byte / 256 for byte in hashlib.blake2b(key, digest_size=1 + count).digest()]
        drafts: list[int] = []
        if draws[0] < _NONE_RATE:
            return drafts
        for draw in draws[1:]:
            correct = follow(drafts)
            drafts.append(correct if draw < RIGHT_RATE else (correct + 1) % vocab_size)
        return drafts


LATE_RATE = 0.15


class DelayedMaskMaker:
    """Computes token bitmasks for a simulated worker: at once or, at random, a step too late. It uses no threads,
    because they would not be repeatable."""

    def __init__(self, random: SeededRandom | None = None) -> None:
        self._random = random
        """None: no mask is late."""
        self._late: list[tuple[Future[TokenBitmask], Callable[[], TokenBitmask]]] = []

    def submit(self, compute: Callable[[], TokenBitmask], expected_s: float) -> NextMask:
        if self._random is None or not self._random.happens(LATE_RATE):
            return compute_inline(compute)
        future: Future[TokenBitmask] = Future()
        self._late.append((future, compute))
        return future

    def catch_up(self) -> None:
        late, self._late = self._late, []
        for future, compute in late:
            result = compute_inline(compute)
            if result.mask is None:
                future.set_exception(result.fault)
            else:
                future.set_result(result.mask)


FIRST_MODEL = "hash"
EMBEDDING_SIZE = 8
_LATER_FIELDS = ("pooling", "grammar", "reasoning", "allowed_token_ids")
"""Fields of `SamplingParams` that `_noise_key` leaves out, except for a grammar or allowed tokens if there are some."""
_UNWRITTEN = -1
_UNWRITTEN_BYTES = b"\xff" * 8


def _cell(position: int, token: int) -> int:
    """Returns the content of a KV cell. It includes the position, so that a block which is read at the wrong place is
    noticed."""
    return position << 32 | token


def next_token(
    history: bytes,
    sampling: SamplingParams,
    position: int,
    vocab_size: int,
    mask: TokenBitmask | None = None,
    model: str = FIRST_MODEL,
) -> int:
    """Returns the next token, a function of (model, request, tokens so far) as in a real model. `history` is the cells
    of all tokens so far."""
    state = hashlib.blake2b(_model_key(model) + _noise_key(sampling) + history, digest_size=8)
    return _sample(state, sampling, position, vocab_size, mask)


def expected_output(
    prompt: Sequence[int],
    sampling: SamplingParams,
    max_output: int,
    vocab_size: int,
    matcher: GrammarMatcher | None = None,
    model: str = FIRST_MODEL,
) -> list[int]:
    """Returns the output of an undisturbed run, including the token that ends it. Advances the matcher over the
    output."""
    state = hashlib.blake2b(_model_key(model) + _noise_key(sampling), digest_size=8)
    state.update(array("q", [_cell(at, token) for at, token in enumerate(prompt)]).tobytes())
    output: list[int] = []
    while len(output) < max_output:
        position = len(output)
        output.append(_sample(state, sampling, position, vocab_size, matcher.mask() if matcher else None))
        state.update(_cell(len(prompt) + position, output[-1]).to_bytes(8, "little"))
        if output[-1] in sampling.end_token_ids and position >= sampling.min_tokens:
            break
        if matcher is not None:
            matcher.advance(output[-1])
            if matcher.done:
                break
    return output


def expected_logprobs(token: int, top: int) -> TokenLogprobs:
    """Returns made-up logprobs that differ between tokens, so that logprobs which arrive with a wrong token are
    noticed."""
    return TokenLogprobs(-token / 8, token + 1, [(token + 1 + rank, -float(rank)) for rank in range(top)])


def expected_embedding(prompt: Sequence[int], sampling: SamplingParams) -> bytes:
    return embedding_of(array("q", [_cell(at, token) for at, token in enumerate(prompt)]).tobytes(), sampling)


def embedding_of(history: bytes, sampling: SamplingParams) -> bytes:
    """Returns eight float32 numbers from -1 to 1, which differ between histories and between kinds of pooling."""
    digest = hashlib.blake2b(f"{sampling.pooling}".encode() + history, digest_size=EMBEDDING_SIZE).digest()
    return array("f", [byte / 128 - 1 for byte in digest]).tobytes()


def _sample(
    state: "hashlib.blake2b", sampling: SamplingParams, position: int, vocab_size: int, mask: TokenBitmask | None
) -> int:
    if mask is not None:
        allowed = _allowed(mask, sampling, position)
        if not allowed:
            raise SlotGrammarError("nothing can follow")
        return allowed[int.from_bytes(state.digest(), "little") % len(allowed)]
    for attempt in range(1000 * vocab_size):
        attempted = state.copy()
        attempted.update(attempt.to_bytes(4, "little"))
        token = int.from_bytes(attempted.digest(), "little") % vocab_size
        if position >= sampling.min_tokens or token not in sampling.end_token_ids:
            return token
    raise AssertionError("some token is always allowed")


def _allowed(mask: TokenBitmask, sampling: SamplingParams, position: int) -> list[int]:
    """Returns the tokens that the mask allows. They may be outside `vocab_size`, because a grammar may need tokens that
    the model does not sample by itself."""
    text = [token for token in mask.token_ids() if token not in sampling.end_token_ids]
    ends = sampling.end_token_ids if mask.may_end and position >= sampling.min_tokens else ()
    return [*text, *ends]


def _model_key(model: str) -> bytes:
    """Returns the part of the hash input that makes models with different names generate different tokens."""
    return b"" if model == FIRST_MODEL else f"{model}\n".encode()


@lru_cache(maxsize=1024)
def _noise_key(sampling: SamplingParams) -> bytes:
    """Returns the sampling fields that decide a token beside the history. Greedy sampling ignores the seed and the
    choice index."""
    greedy = {} if sampling.temperature else {"seed": 0, "choice_index": 0}
    what_decides = msgspec.structs.replace(
        sampling, max_tokens=None, min_tokens=0, end_token_ids=(), logprobs=None, prompt_logprobs=None, **greedy
    )
    # A request without a later field has the key from before it existed, so older scenarios give the same runs.
    later = [value for value in (sampling.grammar, sampling.allowed_token_ids) if value]
    fields = [getattr(what_decides, name) for name in SamplingParams.__struct_fields__ if name not in _LATER_FIELDS]
    return msgspec.msgpack.encode([*fields, *later])


@dataclass(slots=True)
class HashWorkerSlot:
    spec: AssignSlot
    """The slot as the engine has assigned it. The other fields are its current state."""
    token_ids: list[int]
    num_computed: int
    block_ids: list[int]
    grammar: SlotGrammar | None
    initial_drafts: list[int]


KvCells = list["array[int]"]
"""The cells of each block."""


def new_memory(num_blocks: int, block_size: int) -> KvCells:
    return [array("q", [_UNWRITTEN] * block_size) for _ in range(num_blocks)]


class WorkerPoisoned(Exception):
    """The step runs a request that kills every worker."""


class HashWorker:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        vocab_size: int = 64,
        num_token_ids: int | None = None,
        max_model_len: int = 1 << 20,
        kv_transfer: SimKvTransfer | None = None,
        poison: int | None = None,
        doom: int | None = None,
        watch_write: Callable[[int, str, int], None] | None = None,
        grammars: LazyGrammarCompiler | None = None,
        masks: DelayedMaskMaker | None = None,
        drafts: HashDraftProposer | None = None,
        memory: KvCells | None = None,
        kv_memory: str = "",
        model: str = FIRST_MODEL,
    ) -> None:
        """`memory` is the KV memory of an earlier worker, and `kv_memory` its name."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self._kv_memory, self._model = kv_memory, model
        self.kv_transfer = kv_transfer
        """Exchanges KV with other workers; None if the worker does not."""
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self._num_token_ids = num_token_ids or vocab_size
        """Number of token ids. The model samples only the first `vocab_size` of them by itself."""
        self.memory = memory if memory is not None else new_memory(num_blocks, block_size)
        self.slots: dict[int, HashWorkerSlot] = {}
        self.failing_requests: set[str] = set()
        """Ids of requests that fail with `invalid_logits` when they run next."""
        self._grammars, self._masks = grammars, masks or DelayedMaskMaker()
        self._drafts = drafts
        """Proposes drafts if plans permit it."""
        self._poison, self._doom = poison, doom
        """Prompt tokens that always kill the worker, or always make their request fail."""
        self._watch_write = watch_write
        """Called for each block before it is written, with the request id and the slot epoch."""

    def hello(self, incarnation: str = "w1", engine_incarnation: str = "e1") -> WorkerHello:
        return WorkerHello(
            schema_version=SCHEMA_VERSION,
            worker_incarnation=incarnation,
            engine_incarnation=engine_incarnation,
            pid=0,
            fingerprint=self._model,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            vocab_size=self._num_token_ids,
            kv_layout=KvLayout(self._model, "int64", self.block_size, 1, 1, 1) if self.kv_transfer else None,
            kv_endpoint=KvEndpoint("hash", self.kv_transfer.address, incarnation) if self.kv_transfer else None,
            kv_memory=self._kv_memory,
        )

    def step(self, plan: StepPlan) -> StepResult:
        events: list[SlotEvent] = [self._preempt(command) for command in plan.preempt]
        for assign in plan.assign:
            self._assign(assign)
        events += [event for run in plan.run if (event := self._run(run)) is not None]
        self._masks.catch_up()
        return StepResult(plan.step, events)

    def _preempt(self, command: PreemptSlot) -> SlotEvent:
        """Always returns a `SlotPreempted`, also if the slot has failed before: nothing more will come from this
        epoch."""
        slot = self.slots.pop(command.slot, None)
        assert slot is None or slot.spec.slot_epoch == command.slot_epoch, "the engine preempts what it has assigned"
        return SlotPreempted(command.slot, command.slot_epoch, len(slot.token_ids) if slot else 0)

    def _assign(self, assign: AssignSlot) -> None:
        self.slots[assign.slot] = HashWorkerSlot(
            assign,
            list(assign.token_ids),
            assign.num_computed,
            list(assign.block_ids),
            self._grammar(assign),
            list(assign.draft_token_ids),
        )
        if assign.push is not None:
            assert self.kv_transfer is not None, "only a worker with a data plane pushes"
            self.kv_transfer.open_push(assign.push, list(assign.block_ids), self.memory)

    def _grammar(self, assign: AssignSlot) -> SlotGrammar | None:
        if assign.sampling_params.grammar is None:
            return None
        assert self._grammars is not None, "only a worker that knows the vocabulary has grammars"
        output = assign.token_ids[assign.num_prompt :]
        return SlotGrammar(assign.sampling_params.grammar, output, self._grammars, self._masks)

    def _run(self, run: RunSlot) -> SlotEvent | None:
        slot = self.slots.get(run.slot)
        if slot is None:
            return None  # it failed in the previous step, when this plan was sent already
        assert slot.spec.slot_epoch == run.slot_epoch, "the engine runs what it has assigned"
        slot.block_ids += run.new_block_ids
        if self._poison in slot.token_ids:
            raise WorkerPoisoned
        if slot.spec.request_id in self.failing_requests or self._doom in slot.token_ids:
            self.failing_requests.discard(slot.spec.request_id)
            return self._fail(run, "invalid_logits", "told to fail")
        begin, end = slot.num_computed, min(slot.num_computed + run.num_tokens, len(slot.token_ids))
        self._write(slot, begin, slot.token_ids[begin:end])
        slot.num_computed = end
        if slot.spec.push is not None and self.kv_transfer is not None:
            complete = end == len(slot.token_ids)
            self.kv_transfer.advance_push(
                slot.spec.push.lease_id, -(-end // self.block_size) if complete else end // self.block_size
            )
        prompt_logprobs = _prompt_logprobs(slot, begin, end)
        if slot.spec.sampling_params.pooling is not None and end == len(slot.token_ids):
            return self._embed(run, slot)
        if end < len(slot.token_ids):
            return SlotAdvanced(run.slot, run.slot_epoch, end, prompt_logprobs)
        if slot.grammar is not None and not slot.grammar.is_ready:
            if slot.spec.push is None:
                slot.num_computed -= 1  # the next step computes the logits again
                return SlotAdvanced(run.slot, run.slot_epoch, slot.num_computed, prompt_logprobs)
            self._masks.catch_up()
        return self._sample(run, slot, prompt_logprobs)

    def _write(self, slot: HashWorkerSlot, begin: int, token_ids: list[int]) -> None:
        end = begin + len(token_ids)
        if self._watch_write is not None:
            for index in range(begin // self.block_size, -(-end // self.block_size)):
                self._watch_write(slot.block_ids[index], slot.spec.request_id, slot.spec.slot_epoch)
        for position, token in enumerate(token_ids, begin):
            block = self.memory[slot.block_ids[position // self.block_size]]
            block[position % self.block_size] = _cell(position, token)

    def _sample(self, run: RunSlot, slot: HashWorkerSlot, prompt_logprobs: list[TokenLogprobs] | None) -> SlotEvent:
        """Samples one token, and one more for each draft that was right. It does not look for the end of the output,
        because the engine cuts the output."""
        drafts = (
            [] if slot.spec.push is not None or prompt_logprobs is not None else self._draft(slot, run.max_draft_tokens)
        )
        self._write(slot, slot.num_computed, drafts)
        position, grammar_done = len(slot.token_ids) - slot.spec.num_prompt, False
        while True:
            history = self._read_back(slot)
            if _UNWRITTEN_BYTES in history:
                return self._fail(run, "kv_lost", "a cell of the KV memory was never written")
            try:
                token, grammar_done = self._sample_one(slot, history)
            except SlotGrammarError as fault:
                if len(slot.token_ids) == slot.spec.num_prompt + position:
                    return self._fail(run, "grammar_failed", str(fault))
                slot.num_computed -= 1  # the next step meets the fault again
                break
            depth = len(slot.token_ids) - 1 - slot.spec.num_prompt - position
            if grammar_done or drafts[depth : depth + 1] != [token]:
                break
            if slot.grammar is not None and not slot.grammar.is_ready:
                break
            slot.num_computed += 1
        return self._tokens_event(run, slot, position, prompt_logprobs, grammar_done, len(drafts))

    def _sample_one(self, slot: HashWorkerSlot, history: bytes) -> tuple[int, bool]:
        """Returns the next token, and whether it completes the grammar."""
        mask = None if slot.grammar is None else slot.grammar.mask()
        position = len(slot.token_ids) - slot.spec.num_prompt
        token = next_token(history, slot.spec.sampling_params, position, self.vocab_size, mask, self._model)
        grammar_done = _advance_grammar(slot, token)
        slot.token_ids.append(token)
        return token, grammar_done

    def _tokens_event(
        self,
        run: RunSlot,
        slot: HashWorkerSlot,
        position: int,
        prompt_logprobs: list[TokenLogprobs] | None,
        done: bool,
        drafted: int,
    ) -> SlotTokens:
        token_ids, top = slot.token_ids[slot.spec.num_prompt + position :], slot.spec.sampling_params.logprobs
        logprobs = None if top is None else [expected_logprobs(token, top) for token in token_ids]
        drafts = [] if slot.spec.push is None else self._draft(slot, run.max_draft_tokens)
        more = (token_ids, logprobs, prompt_logprobs, done, drafted, drafts)
        return SlotTokens(run.slot, run.slot_epoch, position, slot.num_computed, *more)

    def _draft(self, slot: HashWorkerSlot, count: int) -> list[int]:
        if self._drafts is None or not count:
            return []
        if slot.initial_drafts:
            given, slot.initial_drafts = slot.initial_drafts, []
            return given[:count]
        history = array("q", [_cell(at, token) for at, token in enumerate(slot.token_ids)]).tobytes()
        mask = slot.grammar.mask() if slot.grammar is not None and slot.grammar.is_ready else None

        def follow(drafted: list[int]) -> int:
            begin = len(slot.token_ids)
            behind = array("q", [_cell(begin + at, token) for at, token in enumerate(drafted)]).tobytes()
            position = begin + len(drafted) - slot.spec.num_prompt
            known = mask if not drafted else None
            return next_token(
                history + behind, slot.spec.sampling_params, position, self.vocab_size, known, self._model
            )

        return self._drafts.propose(history, count, follow, self.vocab_size)

    def _embed(self, run: RunSlot, slot: HashWorkerSlot) -> SlotEvent:
        history = self._read_back(slot)
        if _UNWRITTEN_BYTES in history:
            return self._fail(run, "kv_lost", "a cell of the KV memory was never written")
        assert slot.spec.sampling_params.pooling == "last" or slot.spec.num_computed == 0, "a mean needs every row"
        return SlotEmbedding(
            run.slot, run.slot_epoch, slot.num_computed, embedding_of(history, slot.spec.sampling_params)
        )

    def _fail(self, run: RunSlot, code: str, message: str) -> SlotFailed:
        del self.slots[run.slot]
        return SlotFailed(run.slot, run.slot_epoch, code, message)

    def _read_back(self, slot: HashWorkerSlot) -> bytes:
        num_blocks = -(-slot.num_computed // self.block_size)
        cells = b"".join([self.memory[block].tobytes() for block in slot.block_ids[:num_blocks]])
        return cells[: slot.num_computed * 8]


def _advance_grammar(slot: HashWorkerSlot, token: int) -> bool:
    is_text = token not in slot.spec.sampling_params.end_token_ids
    return slot.grammar is not None and is_text and slot.grammar.advance(token)


def _prompt_logprobs(slot: HashWorkerSlot, begin: int, end: int) -> list[TokenLogprobs] | None:
    """Returns the requested logprobs of the tokens that follow those computed in this step, or None. These are prompt
    tokens, unless there is output already, or with `rescore_from` the given tokens."""
    if slot.spec.rescore_from is not None:
        first, last = max(begin + 1, slot.spec.rescore_from), min(end + 1, len(slot.token_ids))
        tops = [slot.spec.sampling_params.prompt_logprobs or 0, slot.spec.sampling_params.logprobs or 0]
        return [
            expected_logprobs(slot.token_ids[i], tops[i >= slot.spec.num_prompt]) for i in range(first, last)
        ] or None
    top = slot.spec.sampling_params.prompt_logprobs
    if top is None or len(slot.token_ids) > slot.spec.num_prompt or begin >= slot.spec.num_prompt - 1:
        return None
    following = slot.token_ids[begin + 1 : min(end + 1, slot.spec.num_prompt)]
    return [expected_logprobs(token, top) for token in following]
