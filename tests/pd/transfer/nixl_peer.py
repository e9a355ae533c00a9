"""The other process of a nixl pair. Its KV memory is the file that it inherits; it takes its orders line by line.

`receive FD NUM_BYTES`: is told numbers of writers, and answers each with an invitation in hex.
`write FD NUM_BYTES`: is told invitations. For each it writes all of its memory again and again, says `wrote` when that
was done once, and at last why it ended.
"""

import itertools
import mmap
import os
import sys

import numpy as np

from onward.pd.transfer.backend import MemoryCopy, TransferFailed
from onward.pd.transfer.nixl_backend import NixlReceiverBackend, NixlSenderBackend


def map_memory(fd: int, num_bytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(fd, num_bytes), dtype=np.uint8)


def receive(memory: np.ndarray) -> None:
    receiver = NixlReceiverBackend(memory)
    for line in sys.stdin:
        print(receiver.register_sender(int(line)).data.hex(), flush=True)


def write(memory: np.ndarray) -> None:
    for line in sys.stdin:
        writer = NixlSenderBackend(memory, bytes.fromhex(line))
        try:
            write_until_it_fails(writer, memory)
        except TransferFailed as failure:
            print(failure, flush=True)


def write_until_it_fails(writer: NixlSenderBackend, memory: np.ndarray) -> None:
    copies = [MemoryCopy(at, at, 4096) for at in range(0, memory.nbytes, 4096)]
    for num_started in itertools.count(1):
        memory += 1
        writer.start(copies)
        while writer.poll() < num_started:
            os.sched_yield()
        if num_started == 1:
            print("wrote", flush=True)


def main() -> None:
    role, fd, num_bytes = sys.argv[1:]
    memory = map_memory(int(fd), int(num_bytes))
    if role == "receive":
        receive(memory)
    else:
        write(memory)


if __name__ == "__main__":
    main()
