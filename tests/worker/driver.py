"""Drives a runner the way an engine would, one request or many, and asks it for logits."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onward.config import WorkerConfig
from onward.proto.model import ModelConfig, PreparedModel
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import AssignSlot, RunSlot, SlotEvent, SlotTokens, StepPlan, StepResult
from onward.worker.logits_processors.mask_executor import MaskExecutor
from onward.worker.model_runner import ModelRunner
from onward.worker.token_span import unowned_span

GREEDY = SamplingParams(seed=0, temperature=0.0)


def prepared(config: ModelConfig, *, dtype: str = "float32", quantization: str = "none") -> PreparedModel:
    return PreparedModel(
        name="small", folder="", config=config, dtype=dtype, quantization=quantization, fingerprint="test",
        weights=[], tokenizer=None, chat_template=None, bos_token=None, eos_token=None, eos_token_ids=[],
    )  # fmt: skip


class Driver:
    """Hands out blocks in a scattered order, so that nothing works by blocks being neighbours."""

    def __init__(
        self, model: PreparedModel, weights: Mapping[str, Any], masks: MaskExecutor | None = None,
        drafter: Any = None, ranks: Any = None, **settings: Any,
    ) -> None:  # fmt: skip
        self.config = WorkerConfig(**({"num_kv_blocks": 256, "max_num_seqs": 64, "max_model_len": 512} | settings))
        from onward.worker.cpu_device import CpuDevice  # not there where only a CUDA device is driven

        self._open(ModelRunner(model, self.config, CpuDevice(model, self.config, weights, drafter, ranks=ranks), masks))

    def _open(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._blocks = np.random.default_rng(7).permutation(runner.num_blocks).tolist()
        self._num_steps = 0
        self._epoch = 0

    def blocks_for(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // self.config.block_size)
        taken, self._blocks = self._blocks[:count], self._blocks[count:]
        assert len(taken) == count
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        self._blocks += blocks

    def assign(
        self, slot: int, token_ids: Sequence[int], *, room: int = 0, sampling: SamplingParams = GREEDY,
        blocks: list[int] | None = None, num_computed: int = 0, num_prompt: int | None = None,
    ) -> AssignSlot:  # fmt: skip
        """A request with blocks for its tokens and `room` more."""
        self._epoch += 1
        blocks = self.blocks_for(len(token_ids) + room) if blocks is None else blocks
        prompt = len(token_ids) if num_prompt is None else num_prompt
        return AssignSlot(slot, self._epoch, f"r{self._epoch}", list(token_ids), prompt, num_computed, blocks, sampling)

    def step(self, **plan: Any) -> list[SlotEvent]:
        self._num_steps += 1
        result = self.runner.step(StepPlan(self._num_steps, **plan))
        assert result.step == self._num_steps
        return result.events

    def generate(self, requests: Sequence[AssignSlot], num_tokens: int) -> list[list[int]]:
        """All requests at once: their prompts in chunks within the budget of a step, then token by token."""
        for request in requests:
            left = len(request.token_ids) - request.num_computed
            self.step(assign=[request])
            while left > 1:
                chunk = min(left - 1, self.config.max_num_batched_tokens)
                self.step(run=[RunSlot(request.slot, request.slot_epoch, chunk)])
                left -= chunk
        outputs: dict[int, list[int]] = {request.slot: [] for request in requests}
        for _ in range(num_tokens):
            for event in self.step(run=[RunSlot(request.slot, request.slot_epoch, 1) for request in requests]):
                assert isinstance(event, SlotTokens)
                assert event.position == len(outputs[event.slot])
                outputs[event.slot] += event.token_ids
        return [outputs[request.slot] for request in requests]

    def overlapped(self, plans: Sequence[StepPlan], depth: int = 2) -> list[StepResult]:
        """All plans, with so many steps in flight."""
        results: list[StepResult] = []
        num_in_flight = 0
        for plan in plans:
            if num_in_flight >= depth:
                results.append(self._finished())
                num_in_flight -= 1
            self.runner.begin(plan)
            num_in_flight += 1
        return results + [self._finished() for _ in range(num_in_flight)]

    def _finished(self) -> StepResult:
        result = self.runner.finish()
        assert result is not None
        return result

    def logits(self, slot: int, token_ids: Sequence[int], chunks: Sequence[int]) -> np.ndarray:
        """Logits of every token of one request, computed in chunks of these sizes."""
        assert sum(chunks) == len(token_ids)
        request = self.assign(slot, token_ids)
        self.step(assign=[request])
        parts, start = [], 0
        for count in chunks:
            parts.append(self.runner.compute_logits([unowned_span(slot, start, count, is_sampled=True)]))
            start += count
        self.give_back(request.block_ids)
        return np.concatenate(parts)
