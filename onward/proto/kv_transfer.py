"""Messages about KV transfers between an engine and its worker.

A lease lets one peer write into some of this instance's blocks. The decode worker expects the writes, counts what arrives
and can revoke the lease. The prefill worker pushes into it while it computes. Both report only what has happened.

    decode engine   -> its worker    ExpectWrites, EndLease, RevokeLease
                    <-               ExpectingWrites, WritesComplete, WriterLost, LeaseQuiesced
    prefill engine  -> its worker    `AssignSlot.push`, StopPush
                    <-               PushComplete, PushFailed, PushQuiesced
"""

import msgspec

from onward.proto.field_types import Count, Duration, Serial, Word64


class KvLayout(msgspec.Struct, frozen=True, array_like=True):
    """Properties that two workers must have in common to exchange KV."""

    fingerprint: str
    """Everything that decides the bits: weights, quantization, kernels, instruction set."""
    dtype: str
    """Data type of keys and values."""
    block_size: Count
    num_layers: Count
    num_kv_heads: Count
    head_dim: Count
    tensor_parallel: Count = 1

    @property
    def name(self) -> str:
        return msgspec.json.encode(self).decode()


class KvEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """Where one decode worker incarnation takes KV in."""

    backend: str
    """`shm`, `tcp` or `nixl`."""
    address: str
    """`unix:@name` or `tcp:host:port`."""
    incarnation: str
    """Incarnation of the worker: a connection to another one is refused."""


class KvPush(msgspec.Struct, frozen=True, array_like=True):
    """Part of an assignment: while it is computed, its KV goes to a peer.

    blocks of the request   |-- first_block: the peer has them --|-- block_ids: the peer's, in order --|
    """

    lease_id: str
    endpoint: KvEndpoint
    first_block: Count
    block_ids: list[Count]
    checksums: bool


class ExpectWrites(msgspec.Struct, frozen=True, array_like=True, tag="expect"):
    """A peer may write these blocks, all layers of each, once."""

    lease_id: str
    block_ids: list[Count]
    checksums: bool


class EndLease(msgspec.Struct, frozen=True, array_like=True, tag="end_lease"):
    """All has arrived and was taken. What else comes for this lease is refused. Not answered."""

    lease_id: str


class RevokeLease(msgspec.Struct, frozen=True, array_like=True, tag="revoke"):
    """Stops all writes under a lease. `LeaseQuiesced` is the reply once no write can follow, also for an unknown
    lease."""

    lease_id: str


class StopPush(msgspec.Struct, frozen=True, array_like=True, tag="stop_push"):
    """Read and write nothing more for this lease. Answered by `PushQuiesced`, always."""

    lease_id: str


KvCommand = ExpectWrites | EndLease | RevokeLease | StopPush


class ExpectingWrites(msgspec.Struct, frozen=True, array_like=True, tag="expecting"):
    """Reply to `ExpectWrites`: writes of a peer that learns of the lease from now on are accepted."""

    lease_id: str


class WritesComplete(msgspec.Struct, frozen=True, array_like=True, tag="counted"):
    """Every block of the lease lies in our memory, in all layers, and its writer has said that it is done."""

    lease_id: str
    checksums: list[Word64] = []
    """Checksum of each block as stored here, if asked for."""
    num_bytes: Serial = 0
    seconds: Duration = 0.0
    """From the first byte to the last."""


class WriterLost(msgspec.Struct, frozen=True, array_like=True, tag="writer_lost"):
    """The peer's connection ended, or it broke the rules, before all had come. The lease is not quiet by that alone."""

    lease_id: str
    message: str


class LeaseQuiesced(msgspec.Struct, frozen=True, array_like=True, tag="lease_quiet"):
    """Nothing will be written under this lease any more."""

    lease_id: str


class PushComplete(msgspec.Struct, frozen=True, array_like=True, tag="sent"):
    """Every block of the push lies in the peer's memory; neither side is touched any more."""

    lease_id: str
    checksums: list[Word64] = []
    num_bytes: Serial = 0
    seconds: Duration = 0.0


class PushFailed(msgspec.Struct, frozen=True, array_like=True, tag="push_failed"):
    """The push cannot be completed; neither side is touched any more."""

    lease_id: str
    message: str


class PushQuiesced(msgspec.Struct, frozen=True, array_like=True, tag="push_quiet"):
    """Answers `StopPush`."""

    lease_id: str


KvReport = ExpectingWrites | WritesComplete | WriterLost | LeaseQuiesced | PushComplete | PushFailed | PushQuiesced
