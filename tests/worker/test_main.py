"""Two whole worker processes: one computes a prompt and writes its KV into the other's memory."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from onward.config import WorkerConfig
from onward.proto.control import StartupProgress, StartWorker, StopChild
from onward.proto.kv_transfer import (
    ExpectingWrites,
    ExpectWrites,
    KvEndpoint,
    KvPush,
    KvReport,
    PushComplete,
    WritesComplete,
)
from onward.proto.step import AssignSlot, RunSlot, SlotTokens, StepPlan, StepResult, WorkerHello
from onward.proto.worker_wire_address import ZmqWireAddress
from onward.transport.control_channel import control_pair
from onward.transport.curve import make_private_address
from onward.transport.zmq_sockets import SocketPoller
from tests.worker import small_int8
from tests.worker.driver import GREEDY, prepared

TIMEOUT_MS = 60_000


class WorkerChild:
    """A worker process, and what its supervisor and its engine have of it."""

    def __init__(self, name: str, backend: str | None) -> None:
        self._control, theirs = control_pair()
        command = [sys.executable, "-m", "onward.worker.main", "--control-fd", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._wires = SocketPoller()
        plans, kv = make_private_address(f"plans-{name}"), make_private_address(f"kv-{name}")
        self.plans, self.kv = self._wires.engine_wire_end(plans[0]), self._wires.engine_kv_wire_end(kv[0])
        config = WorkerConfig(
            num_kv_blocks=32, max_num_seqs=2, max_model_len=128, threads=1, kv_backend=backend, log_level="warning"
        )
        model = prepared(small_int8.CONFIG)
        self._control.send(StartWorker(name, "engine", config, model, ZmqWireAddress(plans[1]), kv[1], "cd" * 32))

    def result(self) -> WorkerHello | StepResult:
        while (message := self.plans.receive()) is None:
            self._wait()
        return message

    def report(self) -> KvReport:
        while (report := self.kv.receive()) is None:
            self._wait()
        return report

    def leave(self) -> int:
        self._control.send(StopChild(1.0))
        return self.process.wait(timeout=TIMEOUT_MS / 1000)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._control.close()
        self._wires.close()

    def _wait(self) -> None:
        while isinstance(self._control.receive(), StartupProgress):
            pass
        assert self.process.poll() is None, "the worker has left"
        self._wires.wait(100)


@pytest.fixture
def children() -> Iterator[tuple[WorkerChild, WorkerChild]]:
    pair = WorkerChild("prefill", None), WorkerChild("decode", "shm")
    yield pair
    for child in pair:
        child.close()


def test_a_prompt_s_kv_goes_from_one_worker_process_to_another(children: tuple[WorkerChild, WorkerChild]) -> None:
    prefill, decode = children
    ours, theirs = prefill.result(), decode.result()
    assert isinstance(ours, WorkerHello) and isinstance(theirs, WorkerHello)
    assert ours.kv_endpoint is None and ours.kv_layout == theirs.kv_layout is not None
    endpoint = theirs.kv_endpoint
    assert isinstance(endpoint, KvEndpoint)
    assert (endpoint.backend, endpoint.incarnation) == ("shm", "decode")

    decode.kv.send(ExpectWrites("lease", [7, 3, 20], checksums=True))
    assert decode.report() == ExpectingWrites("lease")
    push = KvPush("lease", endpoint, 0, [7, 3, 20], checksums=True)
    assign = AssignSlot(0, 1, "request", list(range(40)), 40, 0, [1, 2, 9], GREEDY, push)
    prefill.plans.send(StepPlan(1, assign=[assign], run=[RunSlot(0, 1, 40)]))
    result = prefill.result()
    assert isinstance(result, StepResult)
    [event] = result.events
    assert isinstance(event, SlotTokens)
    sent, counted = prefill.report(), decode.report()
    assert isinstance(sent, PushComplete) and isinstance(counted, WritesComplete)
    assert sent.checksums == counted.checksums and len(set(sent.checksums)) == 3
    assert [child.leave() for child in children] == [0, 0]
