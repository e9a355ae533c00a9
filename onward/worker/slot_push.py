"""The model runner's part of a push: which blocks of a slot go to a peer, and when.

blocks   |-- the peer has them --|-- sent --|-- completed by the step that begins --|-- later --|
         0                  first_block num_sent_blocks                                    num_blocks
"""

from dataclasses import dataclass

from onward.pd.transfer.push_job import ComputedBlocks
from onward.proto.kv_transfer import KvPush


@dataclass(slots=True)
class SlotPush:
    push: KvPush
    num_tokens: int
    """Tokens of the list at its assignment. Their KV is pushed; the KV of tokens that are generated here is not."""
    block_size: int
    num_sent_blocks: int
    """Leading blocks of the slot that were sent, or that the peer has."""

    @classmethod
    def begin(cls, push: KvPush, num_tokens: int, block_size: int) -> "SlotPush":
        return cls(push, num_tokens, block_size, push.first_block)

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.block_size)

    @property
    def names_every_block(self) -> bool:
        """Whether the peer has, or has granted, a block for each block of the list."""
        return self.push.first_block >= 0 and self.push.first_block + len(self.push.block_ids) == self.num_blocks

    def advance(self, num_computed: int, table: list[int], layers_before: int | None) -> ComputedBlocks | None:
        """Returns the blocks to send once `num_computed` tokens are computed; None if no further block is complete. The
        last block is complete when the whole list is computed."""
        is_complete = num_computed >= self.num_tokens
        end = self.num_blocks if is_complete else num_computed // self.block_size
        if end <= self.num_sent_blocks:
            return None
        assert end <= len(table), "the slot has a block for every computed token"
        first, self.num_sent_blocks = self.num_sent_blocks, end
        return ComputedBlocks(self.push.lease_id, first - self.push.first_block, table[first:end], layers_before)
