"""A worker whose model is a hash: the next token is a hash of the whole history *as read back from its KV memory*.

A lost, repeated, stale or overwritten cell, a wrong block table, a prefix hit on the wrong block: each gives other tokens
at once, and `expected_output` says what they should have been. It speaks plans and results like any worker.
"""

import hashlib
from array import array
from dataclasses import dataclass

from onward.proto import SCHEMA_VERSION
from onward.proto.sampling import Sampling
from onward.proto.step import (
    Advanced,
    Assign,
    Event,
    Failed,
    Preempt,
    Preempted,
    Run,
    StepPlan,
    StepResult,
    Tokens,
    WorkerHello,
)

Cell = tuple[int, int]
"""(position, token)"""


def next_token(history: list[int], sampling: Sampling, num_prompt: int, vocab_size: int) -> int:
    """A function of (request, tokens so far), like the real thing."""
    position = len(history) - num_prompt
    seed = sampling.seed if sampling.temperature else 0
    for attempt in range(vocab_size):
        digest = hashlib.blake2b(array("q", [seed, attempt, *history]).tobytes(), digest_size=4).digest()
        token = int.from_bytes(digest, "little") % vocab_size
        if position >= sampling.min_tokens or token not in sampling.end_token_ids:
            return token
    raise AssertionError("some token is always allowed")


def expected_output(prompt: list[int], sampling: Sampling, max_output: int, vocab_size: int) -> list[int]:
    """The output of an undisturbed run, up to and with the token that ends it."""
    history = list(prompt)
    for position in range(max_output):
        history.append(next_token(history, sampling, len(prompt), vocab_size))
        if history[-1] in sampling.end_token_ids and position >= sampling.min_tokens:
            break
    return history[len(prompt) :]


@dataclass(slots=True)
class Slot:
    epoch: int
    token_ids: list[int]
    num_prompt: int
    num_computed: int
    block_ids: list[int]
    sampling: Sampling


class HashWorker:
    def __init__(self, num_blocks: int, block_size: int, *, vocab_size: int = 64, max_model_len: int = 1 << 20) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.memory: list[list[Cell | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.slots: dict[int, Slot] = {}

    def hello(self, incarnation: str = "w1", engine_incarnation: str = "e1") -> WorkerHello:
        return WorkerHello(
            schema_version=SCHEMA_VERSION,
            worker_incarnation=incarnation,
            engine_incarnation=engine_incarnation,
            pid=0,
            fingerprint="hash",
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
        )

    def step(self, plan: StepPlan) -> StepResult:
        events: list[Event] = [self._preempt(command) for command in plan.preempt]
        for assign in plan.assign:
            self._assign(assign)
        events += [event for run in plan.run if (event := self._run(run)) is not None]
        return StepResult(plan.step, events)

    def _preempt(self, command: Preempt) -> Event:
        slot = self.slots.pop(command.slot)
        assert slot.epoch == command.epoch, "the engine preempts what it has assigned"
        return Preempted(command.slot, command.epoch, len(slot.token_ids))

    def _assign(self, assign: Assign) -> None:
        self.slots[assign.slot] = Slot(
            assign.epoch,
            list(assign.token_ids),
            assign.num_prompt,
            assign.num_computed,
            list(assign.block_ids),
            assign.sampling,
        )

    def _run(self, run: Run) -> Event | None:
        slot = self.slots[run.slot]
        assert slot.epoch == run.epoch, "the engine runs what it has assigned"
        slot.block_ids += run.new_block_ids
        end = min(slot.num_computed + run.num_tokens, len(slot.token_ids))
        for position in range(slot.num_computed, end):
            block = slot.block_ids[position // self.block_size]
            self.memory[block][position % self.block_size] = (position, slot.token_ids[position])
        slot.num_computed = end
        if end < len(slot.token_ids):
            return Advanced(run.slot, run.epoch, end)
        return self._sample(run, slot)

    def _sample(self, run: Run, slot: Slot) -> Event:
        history = self._read_back(slot)
        if history is None:
            return Failed(run.slot, run.epoch, "kv_lost", "a cell of the KV memory was never written")
        token = next_token(history, slot.sampling, slot.num_prompt, self.vocab_size)
        slot.token_ids.append(token)
        position = len(slot.token_ids) - 1 - slot.num_prompt
        return Tokens(run.slot, run.epoch, position, slot.num_computed, [token])

    def _read_back(self, slot: Slot) -> list[int] | None:
        cells = [
            self.memory[slot.block_ids[position // self.block_size]][position % self.block_size]
            for position in range(slot.num_computed)
        ]
        if any(cell is None for cell in cells):
            return None
        # The position is mixed in: a block read at the wrong place must not look right.
        return [token if at == position else -1 - at for position, (at, token) in enumerate(cells)]  # type: ignore[misc]
