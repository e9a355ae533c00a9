"""The tensors of slots that kernels read, and their upload to the device: tokens, block tables, sampling parameters.

The host knows only the number of a slot's tokens, because a step is launched before the tokens of the last step have
come to the host. The device has the tokens themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from onward.kernels.ops import SlotTensors
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import AssignSlot
from onward.worker.cuda.staging_buffer import StagedArrayView, StagingBuffer

_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class _PendingUpload:
    target: torch.Tensor
    staged: StagedArrayView


class SlotUploads:
    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, padding_block: int, vocab_size: int, device: str
    ) -> None:
        self.padding_slot = max_num_seqs
        """The slot of a batch's padding rows. Its table names a block that no request holds."""
        self._vocab_size = vocab_size
        max_blocks = -(-max_model_len // block_size)
        self.tensors = SlotTensors.allocate(max_num_seqs + 1, max_model_len + 1, max_blocks, device)
        self.tensors.tables[self.padding_slot] = padding_block
        self._int_params = np.zeros((3, max_num_seqs + 1), np.int64)
        self._float_params = np.zeros((4, max_num_seqs + 1), np.float32)
        self._uploads: list[_PendingUpload] = []
        self._params_changed = False

    def assign(self, assign: AssignSlot, stage: StagingBuffer) -> None:
        """Puts what must be uploaded into the staging buffer; `upload` sends it."""
        slot, token_ids = assign.slot, assign.token_ids
        self._upload(self.tensors.tokens[slot, : len(token_ids)], np.array(token_ids, np.int32), stage)
        if assign.block_ids:
            self.extend(slot, 0, assign.block_ids, stage)
        self._set_sampling(slot, assign.sampling_params, assign.num_prompt)

    def extend(self, slot: int, first: int, block_ids: Sequence[int], stage: StagingBuffer) -> None:
        table = self.tensors.tables[slot, first : first + len(block_ids)]
        self._upload(table, np.array(block_ids, np.int32), stage)

    def upload(self, stage: StagingBuffer) -> None:
        """Sends the staging buffer to the device, and copies the data of slots to their tensors there."""
        if self._params_changed:
            self._upload(self.tensors.int_params, self._int_params, stage)
            self._upload(self.tensors.float_params, self._float_params, stage)
            self._params_changed = False
        stage.send()
        for upload in self._uploads:
            upload.target.copy_(upload.staged.tensor())
        self._uploads.clear()

    def _upload(self, target: torch.Tensor, array: np.ndarray, stage: StagingBuffer) -> None:
        self._uploads.append(_PendingUpload(target, stage.put(array)))

    def _set_sampling(self, slot: int, sampling: SamplingParams, num_prompt: int) -> None:
        seed, choice = (np.uint64(x & _U64).astype(np.int64) for x in (sampling.seed, sampling.choice_index))
        self._int_params[:, slot] = seed, choice, num_prompt
        top_k = sampling.top_k if sampling.top_k < self._vocab_size else 0
        self._float_params[:, slot] = sampling.temperature, sampling.top_p, sampling.min_p, top_k
        self._params_changed = True
