"""Messages between engine and worker: one result for each plan, in order.

A plan names slots; a slot belongs to (request, epoch). These epochs come from one counter for all requests, so an event
with (slot, epoch) can never be applied to another request.

    tokens of a slot   |---- prompt ----|---- generated ----|
                       0          num_prompt           len(token_ids)
    KV is computed for |------------------------>|  num_computed
"""

import msgspec

from onward.proto.field_types import Count, Duration, Factor, Serial, SerialOrNone
from onward.proto.kv_transfer import KvEndpoint, KvLayout, KvPush
from onward.proto.sampling_params import SamplingParams

MAX_PROMPT_LOGPROB_ROWS = 64
"""Prompt tokens of which one step reports logprobs. Each needs the whole vocabulary's logits, so there are few."""


class AssignSlot(msgspec.Struct, frozen=True, array_like=True):
    """Gives a slot to a request, with everything that decides its next token. Replaces whatever the slot held."""

    slot: Count
    slot_epoch: Serial
    request_id: str
    token_ids: list[Count]
    """Prompt and generated tokens: the whole list, also after a preemption or a crash."""
    num_prompt: Count
    num_computed: Count
    """KV of this many leading tokens is already in `block_ids` (a prefix hit)."""
    block_ids: list[Count]
    sampling_params: SamplingParams
    push: KvPush | None = None
    """Where a decode instance waits for this KV."""
    rescore_from: SerialOrNone | None = None
    """Index in `token_ids` behind the prompt: from there on, logprobs of the given tokens are computed again, because
    no process has them any more. They are returned like prompt logprobs."""
    draft_token_ids: list[Count] = []
    """Guesses of the peer that computed the prompt, for what follows `token_ids`: the first step verifies them."""


class RunSlot(msgspec.Struct, frozen=True, array_like=True):
    """Permits a slot to compute up to `num_tokens` further tokens. When that reaches the last known token, the worker
    samples the next token and appends it to the slot. `new_block_ids` extend the slot's block table.

    A slot at its last known token may also draft up to `num_drafts` following tokens, compute them in the same step,
    and keep those that equal the sampled ones. There are blocks for all of them. Without drafts the slot samples one
    token.
    """

    slot: Count
    slot_epoch: Serial
    num_tokens: Count
    new_block_ids: list[Count] = []
    max_draft_tokens: Count = 0


class PreemptSlot(msgspec.Struct, frozen=True, array_like=True):
    """Takes a slot away. Answered by `SlotPreempted` in the same step's result, also when nothing else runs."""

    slot: Count
    slot_epoch: Serial


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """Executed in the order preempt, assign, run. No plan assigns or runs a slot that it preempts."""

    step: Serial
    preempt: list[PreemptSlot] = []
    assign: list[AssignSlot] = []
    run: list[RunSlot] = []


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How likely one token was, and which were the likeliest in its place."""

    logprob: float
    rank: Count
    """1 for the likeliest token of the vocabulary."""
    top: list[tuple[Count, float]] = []
    """(token id, logprob), likeliest first."""


class SlotAdvanced(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """KV was computed up to `num_computed` tokens; there is no new token yet: the prefill is not finished, or the slot
    could not draw in this step and computes its last token again in the next one."""

    slot: Count
    slot_epoch: Serial
    num_computed: Count
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Where asked for: of the prompt tokens that follow those computed in this step."""


class SlotTokens(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="t"):
    """New tokens. `position` is the index of the first one in the request's whole output. All but the last were guessed
    right, so their KV is computed too; what was guessed wrong is not in here."""

    # gc=False here, for `TokenLogprobs` and for `TokenDelta`: one for each token, and never part of a cycle.

    slot: Count
    slot_epoch: Serial
    position: Count
    num_computed: Count
    token_ids: list[Count]
    logprobs: list[TokenLogprobs] | None = None
    """Where asked for: one for each of `token_ids`."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """As in `SlotAdvanced`, from the step that reached the prompt's end."""
    grammar_done: bool = False
    """The last of `token_ids` completes the request's grammar, and nothing can follow it."""
    num_draft_tokens: Count = 0
    """How many were guessed. The first `len(token_ids) - 1` of them were right."""
    draft_token_ids: list[Count] = []
    """For a slot whose KV goes to a peer: drafts of the following tokens. They have no positions yet."""


class SlotPreempted(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """The preempt of this epoch was executed; nothing more will come from it."""

    slot: Count
    slot_epoch: Serial
    num_tokens: Count
    """Length of the slot's token list when it was cleared."""


GRAMMAR_FAILED, NO_TOKEN_ALLOWED = "grammar_failed", "no_token_allowed"
REQUEST_FAULTS = frozenset({GRAMMAR_FAILED, NO_TOKEN_ALLOWED})
"""Codes of a `SlotFailed` that the request itself is the cause of. It would fail everywhere."""


class SlotFailed(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """This request cannot go on. The others are not concerned."""

    slot: Count
    slot_epoch: Serial
    code: str
    message: str


class SlotEmbedding(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="e"):
    """The vector of a whole prompt, where one is wanted instead of tokens. It ends the request."""

    slot: Count
    slot_epoch: Serial
    num_computed: Count
    vector: bytes
    """float32, little-endian."""


SlotEvent = SlotAdvanced | SlotTokens | SlotPreempted | SlotFailed | SlotEmbedding


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The answer to one plan. A slot without an event was not run: it advances nothing and answers nothing."""

    step: Serial
    events: list[SlotEvent]
    busy_s: Duration = 0.0
    """Time the worker spent on this step."""


class WorkerHello(msgspec.Struct, frozen=True, rename={"kv_layout": "layout"}):
    """A worker's first message to its engine: its identity and its memory."""

    schema_version: Count
    worker_incarnation: str
    engine_incarnation: str
    pid: Count
    fingerprint: str
    """Names everything that decides the bits of a logit: weights, quantization, kernels, instruction set."""
    num_blocks: Count
    block_size: Count
    max_model_len: Count
    vocab_size: Count
    kv_layout: KvLayout | None = None
    """Layout of its KV memory; None if the worker cannot exchange KV."""
    kv_endpoint: KvEndpoint | None = None
    """Where peers may write it."""
    kernels: str = ""
    """Description of the kernels, for people to read."""
    threads: Count = 0
    """CPU threads; 0 if a device computes."""
    draft_cost: Factor = 0.0
    """Cost of drafting one token for each slot, as a fraction of the model's own forward pass over them."""
    attention_window: Count | None = None
    """No position more than this far back is read, a token's own included; None: all are."""
    kv_memory: str = ""
    """The name of the KV memory that it has attached; an earlier worker may have written it. Empty: private memory, which
    ends with this worker."""

    @property
    def max_request_tokens(self) -> int:
        """The longest prompt plus output that can ever run: within the context, and within the KV pool."""
        return min(self.max_model_len, self.num_blocks * self.block_size)
