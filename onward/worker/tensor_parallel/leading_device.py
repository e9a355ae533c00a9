"""The device of rank 0 of a float model: it announces each step to the other ranks before rank 0 computes its part."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onward.proto.rank import SlotBlocks
from onward.proto.sampling_params import Pooling, SamplingParams
from onward.proto.step import AssignSlot
from onward.worker.device import Device, DummySteps, KvTransferMemory, LaunchHandle, SampledRow, StepOutput
from onward.worker.slot_state import SlotState
from onward.worker.speculation.draft_manager import DraftManager
from onward.worker.tensor_parallel.shard_group import ShardGroup
from onward.worker.token_bitmasks import TokenBitmasks
from onward.worker.token_span import NO_BLOCK, TokenSpan


class LeadingDevice:
    """Samples, masks and drafts as the device of one rank does: only block tables and spans go to the other ranks."""

    def __init__(self, device: Device, group: ShardGroup) -> None:
        self._device, self._group = device, group
        self._blocks: list[SlotBlocks] = []
        """Changes of block tables that the other ranks have not got."""

    @property
    def is_synchronous(self) -> bool:
        return self._device.is_synchronous

    @property
    def num_blocks(self) -> int:
        return self._device.num_blocks

    @property
    def scratch_block(self) -> int:
        return self._device.scratch_block

    @property
    def num_mask_threads(self) -> int:
        return self._device.num_mask_threads

    @property
    def num_threads(self) -> int:
        return self._device.num_threads

    @property
    def kernels(self) -> str:
        return self._device.kernels

    @property
    def attention_window(self) -> int | None:
        return self._device.attention_window

    @property
    def kv_memory(self) -> KvTransferMemory | None:
        return self._device.kv_memory

    @property
    def draft_manager(self) -> DraftManager | None:
        return self._device.draft_manager

    def assign(self, assign: AssignSlot) -> None:
        self._blocks.append(SlotBlocks(assign.slot, 0, list(assign.block_ids)))
        self._device.assign(assign)

    def extend(self, slot: int, first: int, block_ids: Sequence[int], decoding_at: int | None) -> int:
        carried = self._device.extend(slot, first, block_ids, decoding_at)
        if carried == NO_BLOCK:  # else the span has it
            self._blocks.append(SlotBlocks(slot, first, list(block_ids)))
        return carried

    def new_logits_processor(self, sampling: SamplingParams, prompt: np.ndarray, output: np.ndarray) -> Any:
        return self._device.new_logits_processor(sampling, prompt, output)

    def new_pooler(self, pooling: Pooling) -> Any:
        return self._device.new_pooler(pooling)

    def launch(self, spans: Sequence[TokenSpan[SlotState]], *, is_deferred: bool) -> LaunchHandle:
        if spans:
            self._announce(spans)
        return self._device.launch(spans, is_deferred=is_deferred)

    def new_bitmask(self, handle: LaunchHandle, num_rows: int) -> np.ndarray:
        return self._device.new_bitmask(handle, num_rows)

    def sample(
        self, handle: LaunchHandle, masks: TokenBitmasks | None = None, rows: Sequence[SampledRow] | None = None
    ) -> None:
        self._device.sample(handle, masks, rows)

    def is_done(self, handle: LaunchHandle) -> bool:
        return self._device.is_done(handle)

    def collect(self, handle: LaunchHandle) -> StepOutput:
        return self._device.collect(handle)

    def logits_of(self, spans: Sequence[TokenSpan[Any]]) -> np.ndarray:
        # Every row has logits, so at the other ranks every position is a reported one.
        self._announce([replace(one, is_sampled=False, logprob_positions=range(one.start, one.end)) for one in spans])
        return self._device.logits_of(spans)

    def warm_up_steps(self) -> Iterable[DummySteps]:
        return self._device.warm_up_steps()

    def _announce(self, spans: Sequence[TokenSpan[Any]]) -> None:
        self._group.run(self._blocks, spans)
        self._blocks = []
