"""The name of a full KV block: a hash over its tokens and the name of the block before it.

Equal names mean equal token histories under the same salt, so a name is all that the prefix cache, and later a router,
needs to know.
"""

import hashlib
from array import array
from collections.abc import Sequence

BlockHash = bytes
BLOCK_HASH_BYTES = 16


def root_hash(cache_salt: str) -> BlockHash:
    """Where every chain begins. Tenants with different salts never share a block."""
    return hashlib.blake2b(b"onward:" + cache_salt.encode(), digest_size=BLOCK_HASH_BYTES).digest()


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    return hashlib.blake2b(parent + array("i", token_ids).tobytes(), digest_size=BLOCK_HASH_BYTES).digest()
