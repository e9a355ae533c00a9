"""The hash of a full KV block, over its tokens and the hash of the block before it.

Equal hashes mean equal token histories under the same salt, so the prefix cache and routers compare hashes only.
"""

import hashlib
from array import array
from collections.abc import Sequence

BlockHash = bytes
BLOCK_HASH_BYTES = 16


def root_hash(cache_salt: str) -> BlockHash:
    """Returns the hash with which every chain of block hashes begins. Tenants with different salts never share a
    block."""
    return hashlib.blake2b(b"onward:" + cache_salt.encode(), digest_size=BLOCK_HASH_BYTES).digest()


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    return hashlib.blake2b(parent + array("i", token_ids).tobytes(), digest_size=BLOCK_HASH_BYTES).digest()


def block_hashes(token_ids: list[int], block_size: int, cache_salt: str) -> list[BlockHash]:
    """Names of all full blocks of a prompt."""
    assert block_size > 0, "a block has tokens"
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, token_ids, len(token_ids) // block_size, block_size, cache_salt)
    return hashes


def extend_block_hashes(
    hashes: list[BlockHash], token_ids: list[int], num_blocks: int, block_size: int, cache_salt: str
) -> None:
    """Appends names to those of the leading blocks of `token_ids`, until there are `num_blocks`. In place: an engine calls
    this for each block that a request fills, and a copy of all names each time would cost more than the new one."""
    assert num_blocks * block_size <= len(token_ids), "only full blocks have a name"
    parent = hashes[-1] if hashes else root_hash(cache_salt)
    for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)
