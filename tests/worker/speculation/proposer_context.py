"""A worker's tables without a worker: lists of tokens in slots, over blocks in a scattered order."""

from collections.abc import Sequence

import numpy as np

from onward.config import WorkerConfig
from onward.kernels.cpu.threads import ThreadPool
from onward.proto.model import PreparedModel
from onward.proto.sampling_params import SamplingParams
from onward.worker.kv_pool import BlockTables
from onward.worker.speculation.proposer import DraftRequest, ProposerContext
from tests.worker.driver import GREEDY

NUM_BLOCKS = 64
BLOCK_SIZE = 16


def worker_config(**changes: int) -> WorkerConfig:
    return WorkerConfig(**({"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": BLOCK_SIZE} | changes))


class Tables:
    def __init__(self, model: PreparedModel, *, max_model_len: int = 128, **changes: int) -> None:
        config = worker_config(**changes)
        self._blocks = np.random.default_rng(5).permutation(NUM_BLOCKS).tolist()
        self.around = ProposerContext(
            model=model,
            config=config,
            tokens=np.zeros((config.max_num_seqs, max_model_len + 1), np.int32),
            tables=BlockTables(config.max_num_seqs, max_model_len // BLOCK_SIZE),
            num_blocks=NUM_BLOCKS,
            max_model_len=max_model_len,
            threads=ThreadPool(1),
        )

    def assign(self, slot: int, tokens: Sequence[int], *, room: int = 16, blocks: Sequence[int] = ()) -> list[int]:
        """A slot's list, over these blocks first. Returns all its blocks."""
        count = -(-(len(tokens) + room) // BLOCK_SIZE) - len(blocks)
        table = [*blocks, *self._blocks[:count]]
        self._blocks = self._blocks[count:]
        self.around.tables.replace(slot, table)
        self.grow(slot, 0, tokens)
        return table

    def grow(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        self.around.tokens[slot, start : start + len(tokens)] = tokens


def wish(
    slot: int, num_tokens: int, num_drafts: int, sampling: SamplingParams = GREEDY, num_prompt: int | None = None
) -> DraftRequest:
    return DraftRequest(slot, num_drafts, num_tokens, num_tokens if num_prompt is None else num_prompt, sampling)
