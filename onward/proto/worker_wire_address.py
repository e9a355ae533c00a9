"""How engine and worker reach the wire of one worker incarnation. The supervisor sends it to both."""

import msgspec

from onward.proto.field_types import Count, FileDescriptor, Serial


class ZmqWireAddress(msgspec.Struct, frozen=True, tag="zmq"):
    address: str
    """Carries both incarnations, so nothing meant for another pair can ever arrive there."""


class ShmWireAddress(msgspec.Struct, frozen=True, tag="shm"):
    """Anonymous shared memory and a socket pair as doorbell. Both come as file descriptors; nothing has a name."""

    incarnation: str
    """Incarnation of the worker, which is part of every header."""
    num_slots: Count
    max_tokens_per_row: Count
    plan_bytes: Serial
    extras_bytes: Serial
    memory_fd: FileDescriptor = -1
    """The worker's, inherited. The engine's come with the message itself."""
    doorbell_fd: FileDescriptor = -1


WorkerWireAddress = ZmqWireAddress | ShmWireAddress
