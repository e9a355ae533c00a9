"""KV that one runner computes and pushes serves another as if it had computed it itself."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from onward.models.decoder import DecoderModel
from onward.models.layers.forward_batch import ForwardBatch
from onward.pd.transfer.kv_transfer_thread import KvMemoryRegion, KvTransferThread
from onward.proto.kv_transfer import ExpectingWrites, ExpectWrites, KvEndpoint, KvPush, PushComplete, WritesComplete
from onward.proto.step import AssignSlot, RunSlot, SlotFailed
from onward.transport.curve import make_private_address
from onward.transport.zmq_sockets import SocketPoller
from tests.pd.transfer.instance import TIMEOUT_S, wait_until
from tests.worker import small_int8
from tests.worker.driver import Driver

PROMPT = [(7 * i * i + 3 * i + 5) % 97 for i in range(90)]


class Worker:
    """A runner with its data plane, and its engine's end of the wire."""

    def __init__(self, name: str, backend: str | None = None) -> None:
        self.driver: Driver = small_int8.driver(max_num_batched_tokens=32, kv_backend=backend)
        runner, memory = self.driver.runner, self.driver.runner.device.kv_memory
        assert memory is not None
        pool = self.pool = memory.pool
        self.plane = KvTransferThread(
            KvMemoryRegion(pool.data, pool.fd, pool.geometry, memory.layout), backend=backend, host="127.0.0.1",
            incarnation=name, cluster_key="", layers_done=memory.layers_done,
        )  # fmt: skip
        runner.kv_pusher = self.plane
        engines, workers = make_private_address(f"push-{name}-{id(self)}")
        self._wires, plane_wires = SocketPoller(), SocketPoller()
        self._port = self._wires.engine_kv_wire_end(engines)
        self.plane.start(plane_wires, plane_wires.worker_kv_wire_end(workers))

    def expect(self, blocks: list[int]) -> None:
        self._port.send(ExpectWrites("lease", blocks, True))
        self.hear(ExpectingWrites)

    def hear(self, kind: type[Any]) -> Any:
        for _ in range(int(TIMEOUT_S * 10)):
            self._wires.wait(100)
            if (report := self._port.receive()) is not None:
                assert isinstance(report, kind), report
                return report
        raise AssertionError(f"no {kind.__name__}")

    def close(self) -> None:
        self.plane.close()
        self._wires.close()


@pytest.fixture
def pair() -> Iterator[Callable[[str], tuple[Worker, Worker]]]:
    workers: list[Worker] = []

    def make(backend: str) -> tuple[Worker, Worker]:
        workers.extend([Worker("prefill"), Worker("decode", backend)])
        return workers[-2], workers[-1]

    yield make
    for worker in workers:
        worker.close()


def with_push(request: AssignSlot, to: KvEndpoint, first_block: int, blocks: list[int]) -> AssignSlot:
    push = KvPush("lease", to, first_block, blocks, True)
    return AssignSlot(**({name: getattr(request, name) for name in request.__struct_fields__} | {"push": push}))


def prefill(worker: Worker, request: AssignSlot, chunks: list[int]) -> list:
    events = worker.driver.step(assign=[request])
    for chunk in chunks:
        events += worker.driver.step(run=[RunSlot(request.slot, request.slot_epoch, chunk)])
    return events


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("length", "chunks", "num_cached"),
    [
        (1, [1], 0),
        (16, [16], 0),
        (17, [10, 7], 0),
        (90, [32, 32, 26], 0),
        (90, [5, 1, 30, 32, 22], 32),
        (48, [7, 9], 32),
    ],
)
def test_a_prompt_that_was_prefilled_elsewhere_decodes_to_the_same_bits(
    pair: Callable[[str], tuple[Worker, Worker]], backend: str, length: int, chunks: list[int], num_cached: int
) -> None:
    alone = small_int8.driver(max_num_batched_tokens=32)
    prompt = PROMPT[:length]
    whole = alone.generate([alone.assign(0, prompt, room=20)], 12)[0]
    ours, theirs = pair(backend)
    target = theirs.driver.blocks_for(length + 20)
    num_blocks = -(-length // 16)
    first_block = num_cached // 16 // 2
    if num_cached:  # both have a prefix of it: ours all that is cached, theirs half of that
        request = ours.driver.assign(3, prompt[:num_cached])
        prefill(ours, request, [num_cached])
        cached = request.block_ids + ours.driver.blocks_for(length - num_cached)
        prefill(theirs, theirs.driver.assign(3, prompt[:num_cached], blocks=target[: num_cached // 16]), [num_cached])
    else:
        cached = None
    theirs.expect(target[first_block:num_blocks])
    request = ours.driver.assign(1, prompt, blocks=cached, num_computed=num_cached)
    request = with_push(request, theirs.plane.endpoint, first_block, target[first_block:num_blocks])
    first = prefill(ours, request, chunks)[-1].token_ids
    assert ours.hear(PushComplete).checksums == theirs.hear(WritesComplete).checksums
    resumed = theirs.driver.assign(2, prompt + first, blocks=target, num_computed=length)
    assert first + theirs.driver.generate([resumed], 11)[0] == whole


class Watched:
    """A decoder that has computed everything, but says so layer by layer, when what it said before has had its effect."""

    def __init__(self, decoder: DecoderModel, num_layers: int, arrived: Callable[[int], bool]) -> None:
        self._decoder, self._num_layers, self._arrived = decoder, num_layers, arrived
        self._done = 0

    def forward(self, rows: ForwardBatch) -> np.ndarray:
        logits = self._decoder.forward(rows)
        for layer in range(self._num_layers):
            assert not self._arrived(layer), "a layer that is not done is not pushed"
            self._done += 1
            wait_until(lambda: self._arrived(layer))  # noqa: B023
        return logits

    def layers_done(self) -> int:
        return self._done

    def phase_cycles(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_each_layer_has_arrived_before_the_forward_pass_is_over(
    pair: Callable[[str], tuple[Worker, Worker]], backend: str
) -> None:
    ours, theirs = pair(backend)
    request = ours.driver.assign(1, PROMPT[:20])

    def pages(worker: Worker, layer: int, block: int) -> bytes:
        at = worker.pool.geometry.page_offset(layer, block)
        return worker.pool.data[at : at + worker.pool.geometry.page_bytes].tobytes()

    def arrived(layer: int) -> bool:
        pairs = zip(request.block_ids, [5, 9], strict=True)
        return all(pages(ours, layer, source) == pages(theirs, layer, target) for source, target in pairs)

    runner = ours.driver.runner
    runner.device._decoder = Watched(runner.device._decoder, small_int8.CONFIG.num_layers, arrived)
    theirs.expect([5, 9])
    request = with_push(request, theirs.plane.endpoint, 0, [5, 9])
    prefill(ours, request, [20])
    ours.hear(PushComplete)


@pytest.mark.parametrize(("first_block", "blocks"), [(0, [1]), (1, [1, 2]), (3, []), (-1, [1, 2, 3])])
def test_a_push_that_is_not_of_the_list_s_blocks_fails_its_request(
    pair: Callable[[str], tuple[Worker, Worker]], first_block: int, blocks: list[int]
) -> None:
    ours, theirs = pair("shm")
    request = with_push(ours.driver.assign(1, PROMPT[:20]), theirs.plane.endpoint, first_block, blocks)
    [failed] = ours.driver.step(assign=[request])
    assert isinstance(failed, SlotFailed) and "the list's 2 blocks" in failed.message


def test_a_runner_without_a_data_plane_fails_a_request_that_is_to_be_pushed() -> None:
    driver = small_int8.driver()
    request = with_push(driver.assign(1, PROMPT[:20]), KvEndpoint("tcp", "tcp:127.0.0.1:1", "w"), 0, [1, 2])
    [failed] = driver.step(assign=[request])
    assert isinstance(failed, SlotFailed) and failed.code == "internal_error"
    assert len(driver.generate([driver.assign(1, PROMPT[:20], room=2)], 2)[0]) == 2


def test_a_worker_says_how_its_kv_is_laid_out() -> None:
    hello = small_int8.driver().runner.hello("w", "e")
    assert hello.kv_layout is not None and hello.kv_endpoint is None
    assert (hello.kv_layout.dtype, hello.kv_layout.block_size, hello.kv_layout.num_layers) == ("int8", 16, 2)
    assert (hello.kv_layout.fingerprint, hello.kv_layout.num_kv_heads, hello.kv_layout.head_dim) == ("test", 2, 32)
