"""Detects whether a peer may still write the KV memory of a dead worker, if peers map that memory (`shm`).

A peer keeps its mapping after the death of the worker that gave it the memory. So each worker gets the write end of a
pipe, the writer token, and gives a copy to every peer together with the memory. A peer closes its copy after it has
unmapped the memory, and the kernel does both, in this order, for a peer that is killed. So the read end, which the
supervisor keeps, reports that no copy is left only when no process can write the memory any more. The token needs no
message that could be lost, and it outlives workers and engines on both sides.

With `tcp` and `nixl` the dead worker itself had received the writes of its peers, so there is nothing left to watch.
"""

import os
import select


class PeerWriterWatch:
    def __init__(self) -> None:
        self._read_fd, self._token_fd = os.pipe2(os.O_CLOEXEC)

    @property
    def token_fd(self) -> int:
        """The writer token, which the worker inherits; valid until `close_token`."""
        return self._token_fd

    def close_token(self) -> None:
        """Closes the supervisor's own copy, after the worker has inherited one."""
        if self._token_fd >= 0:
            os.close(self._token_fd)
        self._token_fd = -1

    def wait_until_quiet(self, timeout_s: float) -> bool:
        """Waits until no peer can write the memory of the dead worker. Returns False if some still can after this
        time."""
        assert self._token_fd < 0, "the supervisor's own copy would be waited for"
        poll = select.poll()
        poll.register(self._read_fd, 0)  # the end of a pipe is reported without being asked for
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        self.close_token()
        os.close(self._read_fd)
