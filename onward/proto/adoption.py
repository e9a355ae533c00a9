"""Messages between two supervisors on one machine: the new server of `onward serve --adopt` and the old one that it
replaces.

    new server             old server
    AdoptionRequest  ->
                     <-    ServerOffer, with the listening sockets
                     <-    MemoryOffer, with the KV memory and the weights (if it keeps them)
    (starts beside the old one)
    TakeOver         ->
                           (ends its streams, reaps all its processes)
                     <-    MemoryReleased: from here on the new one may write the memory
    NowServing       ->
                           (exits)

A new server that fails before `TakeOver` sends `AdoptionAborted`, or just closes the connection.
"""

import msgspec

from onward.config import Device
from onward.proto.control import KeptWeights
from onward.proto.field_types import Count, Serial

ADOPTION_PROTOCOL = 1
"""Raised when these messages change."""


class MemoryFormat(msgspec.Struct, frozen=True):
    """Properties that must be equal for one server to use the KV memory of another. Field names appear in logs."""

    device: Device
    model_fingerprint: str
    kernel_version: Count
    kv_layout: str
    block_size: Count
    num_kv_blocks: Count
    """0: any number, as a new server has it that takes over what is there."""
    hash_table_format: Count


class AdoptionRequest(msgspec.Struct, frozen=True, tag="adopt_request"):
    """The new server asks the old one for its listening sockets and its memory. The old server answers with its
    offers or with `AdoptRefused`, and goes on serving until `TakeOver`."""

    protocol: Count
    """The new server's `ADOPTION_PROTOCOL`. The old server refuses any other than its own."""


class ServerOffer(msgspec.Struct, frozen=True, tag="server_offer"):
    """The listening socket for clients travels with it, then the one for decode instances, if there is one."""

    has_handoff_socket: bool
    has_memory: bool
    """Whether a `MemoryOffer` follows."""
    version: str
    """Version of the old server, for logs."""


class MemoryOffer(msgspec.Struct, frozen=True, tag="memory_offer"):
    """KV memory that the old server still uses: until `MemoryReleased` only a standby worker may map it. The descriptors of
    the pool, of the table of block hashes and of the weights (if there are any) travel with it."""

    kv_memory: str
    """The old server's name for it."""
    format: MemoryFormat
    num_pool_bytes: Serial
    """On a CUDA device."""
    weights: KeptWeights | None = None


class AdoptRefused(msgspec.Struct, frozen=True, tag="adopt_refused"):
    message: str


class TakeOver(msgspec.Struct, frozen=True, tag="take_over"):
    """The new server is ready to serve."""


class MemoryReleased(msgspec.Struct, frozen=True, tag="memory_released"):
    """Every process of the old server but its supervisor is dead and reaped."""

    kv_memory: str
    """Memory that the new server may use. Empty if it was given up, for example because a fault may have damaged it."""


class NowServing(msgspec.Struct, frozen=True, tag="now_serving"):
    pass


class AdoptionAborted(msgspec.Struct, frozen=True, tag="adoption_aborted"):
    """The new server ends; the old one goes on."""

    is_memory_suspect: bool
    """The standby worker, which had mapped the memory, has died of a fault."""


FromSuccessor = AdoptionRequest | TakeOver | NowServing | AdoptionAborted
FromPredecessor = ServerOffer | MemoryOffer | AdoptRefused | MemoryReleased
