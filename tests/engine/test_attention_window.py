"""Blocks that no layer looks at any more are given to others while their request runs."""

import msgspec
import pytest

from onward.proto.step import WorkerHello
from onward.sim.hash_worker import HashWorker, HashWorkerSlot, _cell
from tests.engine.harness import Harness

WINDOW, BLOCK_SIZE = 6, 4
MAX_HELD = 4
"""Blocks: two that a window may touch beside its own, and one for each step in flight to grow into."""


class WindowWorker(HashWorker):
    """Reads KV within a window only; what came before it knows from the tokens, as layers carry it along."""

    def hello(self, incarnation: str = "w1", engine_incarnation: str = "e1") -> WorkerHello:
        return msgspec.structs.replace(super().hello(incarnation, engine_incarnation), attention_window=WINDOW)

    def _read_back(self, slot: HashWorkerSlot) -> bytes:
        first = max(0, len(slot.token_ids) - WINDOW)
        known = b"".join(_cell(i, token).to_bytes(8, "little") for i, token in enumerate(slot.token_ids[:first]))
        return known + super()._read_back(slot)[8 * first :]


class WindowHarness(Harness):
    worker_class = WindowWorker

    def check(self) -> None:
        super().check()
        for request in self.core.scheduler.running:
            if request.num_computed == len(request.token_ids) - 1:  # it decodes
                assert len(request.held_block_ids) <= MAX_HELD


def run(harness: Harness, num_requests: int = 6, length: int = 80) -> None:
    prompt = list(range(1, 11))
    for number in range(num_requests):
        harness.submit(f"r{number}", [*prompt, number], max_tokens=length)
    while not harness.core.idle:
        while harness.plan() is not None:
            harness.check()
        harness.answer()
        harness.check()


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("output_caching", [True, False])
def test_requests_that_are_longer_than_the_pool_together_run_without_preemption(
    prefix_caching: bool, output_caching: bool
) -> None:
    flags = {"prefix_caching": prefix_caching, "output_caching": output_caching}
    harness = WindowHarness(num_blocks=40, block_size=BLOCK_SIZE, **flags)
    run(harness)
    harness.check_all_exact()
    assert harness.metric("preemptions") == 0
    harness.core.audit_idle()


def test_without_a_window_the_same_requests_are_preempted() -> None:
    harness = Harness(num_blocks=40, block_size=BLOCK_SIZE)
    run(harness)
    harness.check_all_exact()
    assert harness.metric("preemptions") > 0


def test_a_preempted_request_and_one_whose_worker_died_go_on_with_the_same_tokens() -> None:
    harness = WindowHarness(num_blocks=26, block_size=BLOCK_SIZE)
    for number in range(5):
        harness.submit(f"r{number}", [number, 7, 8, 9], max_tokens=60, priority=5)
    for _ in range(40):
        harness.plan()
        harness.answer()
    harness.submit("urgent", list(range(1, 60)), max_tokens=20, priority=0)
    for _ in range(25):
        harness.plan()
        harness.answer()
        harness.check()
    harness.crash_worker()
    harness.run_until_idle()
    harness.check_all_exact()
    assert harness.metric("preemptions") > 0
    harness.core.audit_idle()
