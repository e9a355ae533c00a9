"""An `Instance` in a process of its own, that can be stopped and killed. Does what each line of its input says."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from onward.proto.kv_transfer import KvEndpoint
from tests.pd.transfer.instance import Instance

ROOT = Path(__file__).parents[3]
NUM_BLOCKS = 1500


class InstanceProcess:
    """The test's end of it. Its memory has 1500 blocks, filled from seed 7."""

    def __init__(self, backend: str = "", fds: tuple[int, ...] = ()) -> None:
        """`fds`: of its memory and of the writer token, as a supervisor hands them to a worker."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.pd.transfer.instance_process", backend, *map(str, fds)],
            cwd=ROOT,
            pass_fds=fds,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self.address, self.incarnation = self._line().split()
        self.endpoint = KvEndpoint(backend, self.address, self.incarnation)

    def expect(self, blocks: list[int], lease_id: str = "lease") -> None:
        self._do("expect", blocks, lease_id)

    def push(self, to: KvEndpoint, blocks: list[int], lease_id: str = "lease") -> None:
        self._do("push", blocks, lease_id, to)

    def feed(self, blocks: list[int], lease_id: str = "lease", *, first: int = 0) -> None:
        self._do("feed", blocks, lease_id, first=first)

    def signal(self, number: int) -> None:
        """Returns when it has taken effect."""
        os.kill(self._process.pid, number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)
        if number == signal.SIGKILL:
            self._process.wait()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _do(self, verb: str, blocks: list[int], lease_id: str, to: KvEndpoint | None = None, first: int = 0) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(_Task(verb, blocks, lease_id, to, first)).decode() + "\n")
        self._process.stdin.flush()
        assert self._line() == "done"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class _Task(msgspec.Struct):
    verb: str
    blocks: list[int]
    lease_id: str
    to: KvEndpoint | None
    first: int


def main() -> None:
    backend = sys.argv[1] or None
    fds = dict(zip(("memory_fd", "writer_token_fd"), map(int, sys.argv[2:]), strict=False))
    instance = Instance(backend, num_blocks=NUM_BLOCKS, seed=7, **fds)
    print(*((instance.endpoint.address, instance.endpoint.incarnation) if backend else ("none", "none")), flush=True)
    for line in sys.stdin:
        task = msgspec.json.decode(line, type=_Task)
        match task.verb:
            case "expect":
                instance.expect(task.blocks, task.lease_id)
            case "push":
                assert task.to is not None
                instance.push(task.to, task.blocks, task.lease_id)
            case "feed":
                instance.feed(task.blocks, task.lease_id, first=task.first)
        print("done", flush=True)


if __name__ == "__main__":
    main()
