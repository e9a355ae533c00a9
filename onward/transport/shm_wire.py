"""The worker wire by shared memory: plans and results in anonymous memory, with a socket pair that wakes the reader.

The memory is a ring of four steps; two are in flight, so it is never full. Each entry holds a plan and its result. A
header that is written last publishes each of them:

    entry     | plan header | plan, msgpack | result header | rows | side records |
    header      incarnation, step, length of rows or plan, length of side records, time, checksum

If a worker is killed in the middle of a write, the header does not match, so a step is read completely or not at all. A
reader blocks on the socket, so it uses no processor time while it waits. The memory has no name, so the kernel frees it
when both processes are dead.
"""

import contextlib
import mmap
import os
import socket
import struct
import zlib
from dataclasses import dataclass

import msgspec

from onward.proto.step import StepPlan, StepResult, WorkerHello
from onward.proto.worker_wire_address import ShmWireAddress
from onward.transport import shm_rows

NUM_RING_ENTRIES = 4
MAX_HELLO_BYTES = 1 << 16
_HEADER = struct.Struct("<IQQQdI")
_HEADER_BYTES = 64
_RING = b"!"


class WorkerWireBroken(Exception):
    """The other side is gone, or an entry of the ring is not complete."""


class WorkerWireClosed(WorkerWireBroken):
    """The process at the other end is gone or is exiting."""


@dataclass(slots=True, frozen=True)
class RingLayout:
    """Byte offsets and sizes within one entry of the ring."""

    plan_at: int
    rows_at: int
    rows_bytes: int
    extras_at: int
    entry_bytes: int

    @property
    def memory_bytes(self) -> int:
        return NUM_RING_ENTRIES * self.entry_bytes


def ring_layout(address: ShmWireAddress) -> RingLayout:
    rows_bytes = address.num_slots * shm_rows.num_columns(address.max_tokens_per_row) * shm_rows.CELL_BYTES
    plan_at = _HEADER_BYTES
    rows_at = _aligned(plan_at + address.plan_bytes) + _HEADER_BYTES
    extras_at = _aligned(rows_at + rows_bytes)
    return RingLayout(plan_at, rows_at, rows_bytes, extras_at, _aligned(extras_at + address.extras_bytes))


def _aligned(size: int) -> int:
    return -(-size // _HEADER_BYTES) * _HEADER_BYTES


def create_ring(address: ShmWireAddress) -> tuple[int, socket.socket, socket.socket]:
    """Returns the memory's file descriptor, and the two ends of the doorbell. The kernel allocates pages only when they
    are written. Raises `OSError` if the system does not allow it, and leaves nothing open."""
    fd = os.memfd_create("onward", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, ring_layout(address).memory_bytes)
        parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        os.close(fd)
        raise
    return fd, parent_end, child_end


class _SharedRing:
    """The mapped memory and the doorbell, the same for either end."""

    def __init__(self, address: ShmWireAddress, memory_fd: int, doorbell: socket.socket) -> None:
        self.address, self.layout = address, ring_layout(address)
        self._mapped = mmap.mmap(memory_fd, self.layout.memory_bytes)
        os.close(memory_fd)
        self.memory = memoryview(self._mapped)
        self.doorbell = doorbell
        self.doorbell.setblocking(False)
        self._incarnation = zlib.crc32(address.incarnation.encode())

    def publish(self, offset: int, step: int, body: bytes, extras_at: int, extras: bytes, busy_s: float) -> None:
        """Clears the header, then writes the body, and the new header last. The cleared header belongs to a step that
        was read long before."""
        header = _HEADER.pack(0, 0, 0, 0, 0.0, 0)
        self.memory[offset - _HEADER_BYTES : offset - _HEADER_BYTES + len(header)] = header
        self.memory[offset : offset + len(body)] = body
        if extras:
            self.memory[extras_at : extras_at + len(extras)] = extras
        checksum = zlib.crc32(extras, zlib.crc32(body, self._incarnation))
        header = _HEADER.pack(self._incarnation, step, len(body), len(extras), busy_s, checksum)
        self.memory[offset - _HEADER_BYTES : offset - _HEADER_BYTES + len(header)] = header

    def read_entry(self, offset: int, step: int, extras_at: int) -> tuple[bytes, bytes, float]:
        """Returns what was published for this step; raises `WorkerWireBroken` if it is incomplete."""
        incarnation, found_step, body_bytes, extras_bytes, busy_s, checksum = _HEADER.unpack_from(
            self.memory, offset - _HEADER_BYTES
        )
        if incarnation != self._incarnation or found_step != step:
            raise WorkerWireBroken(f"step {step} was announced and is not there")
        body = bytes(self.memory[offset : offset + body_bytes])
        extras = bytes(self.memory[extras_at : extras_at + extras_bytes])
        if zlib.crc32(extras, zlib.crc32(body, self._incarnation)) != checksum:
            raise WorkerWireBroken(f"step {step} is damaged")
        return body, extras, busy_s

    def entry_offset(self, step: int) -> int:
        return step % NUM_RING_ENTRIES * self.layout.entry_bytes

    def ring_doorbell(self, message: bytes = _RING) -> None:
        try:
            self.doorbell.send(message)
        except OSError as fault:
            raise WorkerWireClosed(str(fault)) from fault

    def receive_doorbell(self) -> bytes | None:
        """Returns the next message on the doorbell, or None."""
        try:
            message = self.doorbell.recv(MAX_HELLO_BYTES)
        except BlockingIOError:
            return None
        except OSError as fault:
            raise WorkerWireClosed(str(fault)) from fault
        if not message:
            raise WorkerWireClosed("the other side is gone")
        return message

    def close(self) -> None:
        self.doorbell.close()
        self.memory.release()
        self._mapped.close()


class ShmEngineWireEnd:
    """The engine's end."""

    def __init__(self, address: ShmWireAddress, memory_fd: int, doorbell: socket.socket) -> None:
        self._ring = _SharedRing(address, memory_fd, doorbell)
        self._plan_encoder = msgspec.msgpack.Encoder()
        self._hello_decoder = msgspec.msgpack.Decoder(WorkerHello)
        self._sent = self._received = 0
        self._first_step: int | None = None

    @property
    def pollable(self) -> int:
        return self._ring.doorbell.fileno()

    def send(self, plan: StepPlan) -> None:
        if self._first_step is None:
            self._first_step = plan.step
        assert plan.step == self._first_step + self._sent, "steps are numbered without gaps"
        assert self._sent - self._received < NUM_RING_ENTRIES, "the ring holds more steps than are ever in flight"
        body = self._plan_encoder.encode(plan)
        assert len(body) <= self._ring.address.plan_bytes, "a place holds the largest plan there can be"
        entry_at = self._ring.entry_offset(plan.step)
        self._ring.publish(entry_at + self._ring.layout.plan_at, plan.step, body, 0, b"", 0.0)
        self._sent += 1
        with contextlib.suppress(WorkerWireBroken):  # the supervisor reports deaths, and then the plan is void
            self._ring.ring_doorbell()

    def receive(self) -> WorkerHello | StepResult | None:
        try:
            message = self._ring.receive_doorbell()
        except WorkerWireBroken:
            return None  # the supervisor reports deaths
        if message is None:
            return None
        return self._read_result() if message == _RING else self._hello_decoder.decode(message)

    def close(self) -> None:
        self._ring.close()

    def _read_result(self) -> StepResult:
        assert self._first_step is not None, "a result answers a plan"
        step, layout = self._first_step + self._received, self._ring.layout
        entry_at = self._ring.entry_offset(step)
        body, extras, busy_s = self._ring.read_entry(entry_at + layout.rows_at, step, entry_at + layout.extras_at)
        self._received += 1
        cells = memoryview(body).cast("q").tolist()
        return StepResult(step, shm_rows.decode(cells, extras, self._ring.address.max_tokens_per_row), busy_s)


class ShmWorkerWireEnd:
    """The worker's end of the wire: sends one hello, then receives step plans and sends the result of each."""

    def __init__(self, address: ShmWireAddress, memory_fd: int, doorbell: socket.socket) -> None:
        self._ring = _SharedRing(address, memory_fd, doorbell)
        self._hello_encoder = msgspec.msgpack.Encoder()
        self._plan_decoder = msgspec.msgpack.Decoder(StepPlan)
        self._next_step: int | None = None

    @property
    def pollable(self) -> int:
        return self._ring.doorbell.fileno()

    def send(self, message: WorkerHello | StepResult) -> None:
        if isinstance(message, WorkerHello):
            self._ring.ring_doorbell(self._hello_encoder.encode(message))
            return
        address, layout = self._ring.address, self._ring.layout
        cells, extras = shm_rows.encode(message.events, address.num_slots, address.max_tokens_per_row)
        assert len(extras) <= address.extras_bytes, "a place holds the largest side records there can be"
        entry_at = self._ring.entry_offset(message.step)
        self._ring.publish(
            entry_at + layout.rows_at,
            message.step,
            cells.tobytes(),
            entry_at + layout.extras_at,
            extras,
            message.busy_s,
        )
        self._ring.ring_doorbell()

    def receive(self) -> StepPlan | None:
        """Returns the next plan. The first one sets the step number at which this worker begins."""
        if self._ring.receive_doorbell() is None:
            return None
        step = self._next_step if self._next_step is not None else self._first_published()
        body, _, _ = self._ring.read_entry(self._ring.entry_offset(step) + self._ring.layout.plan_at, step, 0)
        self._next_step = step + 1
        return self._plan_decoder.decode(body)

    def close(self) -> None:
        self._ring.close()

    def _first_published(self) -> int:
        """Returns the lowest step in the ring. The engine may have published a second one before this first read."""
        headers = (
            _HEADER.unpack_from(self._ring.memory, index * self._ring.layout.entry_bytes)
            for index in range(NUM_RING_ENTRIES)
        )
        return min(step for incarnation, step, *_ in headers if incarnation)
