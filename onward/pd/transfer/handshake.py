"""The proofs by which two workers show each other that they hold the cluster key, without revealing it.

Each proof covers both nonces, all claims of the writer, and the role of the prover, so it cannot be used by or for
another worker. Without a cluster key the key is empty and proves nothing; then only addresses of this machine are used.
"""

import hashlib
import hmac
import secrets

import msgspec

from onward.pd.transfer.transfer_messages import SenderHello
from onward.proto import SCHEMA_VERSION
from onward.proto.kv_transfer import KvLayout

NONCE_BYTES = 32


class ClusterSecret:
    """`cluster_key` is hex, as in the process's first message."""

    def __init__(self, cluster_key: str) -> None:
        self._key = hashlib.blake2b(bytes.fromhex(cluster_key), digest_size=32, person=b"onward kv plane").digest()

    def sign(self, role: str, greeting: SenderHello, nonce: bytes) -> bytes:
        signed = msgspec.msgpack.encode([role, greeting, nonce])
        return hmac.digest(self._key, signed, "sha256")

    def verify(self, proof: bytes, role: str, greeting: SenderHello, nonce: bytes) -> bool:
        return hmac.compare_digest(proof, self.sign(role, greeting, nonce))


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def refusal_reason(greeting: SenderHello, incarnation: str, layout: KvLayout) -> str | None:
    """Returns why a receiver refuses a writer that holds the key, or None."""
    if greeting.version != SCHEMA_VERSION:
        return f"the peer speaks version {greeting.version} of the messages, this worker {SCHEMA_VERSION}"
    if len(greeting.nonce) != NONCE_BYTES:
        return f"the peer's nonce has {len(greeting.nonce)} bytes, not {NONCE_BYTES}"
    if greeting.incarnation != incarnation:
        return f"the peer means worker {greeting.incarnation}, this one is {incarnation}"
    if greeting.layout != layout:
        return f"the peer's KV is laid out as {greeting.layout.name}, this worker's as {layout.name}"
    return None
