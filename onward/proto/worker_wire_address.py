"""Where engine and worker meet: how the wire of one worker incarnation is reached, as the supervisor tells both."""

import msgspec

from onward.proto.field_types import Count, FileDescriptor, Serial


class ZmqWireAddress(msgspec.Struct, frozen=True, tag="zmq"):
    address: str
    """Carries both incarnations, so nothing meant for another pair can ever arrive there."""


class ShmWireAddress(msgspec.Struct, frozen=True, tag="shm"):
    """Anonymous shared memory and a socket pair as doorbell. Both come as file descriptors; nothing has a name."""

    incarnation: str
    """Of the worker; written into every header."""
    num_slots: Count
    max_tokens_per_row: Count
    plan_bytes: Serial
    extras_bytes: Serial
    memory_fd: FileDescriptor = -1
    """The worker's, inherited. The engine's come with the message itself."""
    doorbell_fd: FileDescriptor = -1


WorkerWireAddress = ZmqWireAddress | ShmWireAddress
