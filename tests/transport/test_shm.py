"""The shared-memory wire: every event survives it, and what is not whole is never read."""

import os
import signal
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.proto.step import (
    SlotAdvanced,
    SlotEmbedding,
    SlotFailed,
    SlotPreempted,
    SlotTokens,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from onward.proto.worker_wire_address import ShmWireAddress
from onward.transport import shm_rows, shm_wire
from onward.transport.shm_wire import NUM_RING_ENTRIES, ShmEngineWireEnd, ShmWorkerWireEnd, WorkerWireBroken
from tests.transport.test_zmq import HELLO, PLAN

WIRE = ShmWireAddress("worker-1", num_slots=8, max_tokens_per_row=5, plan_bytes=10_000, extras_bytes=10_000)


@pytest.fixture
def ends() -> Iterator[tuple[ShmEngineWireEnd, ShmWorkerWireEnd]]:
    memory, ours, theirs = shm_wire.create_ring(WIRE)
    engine = ShmEngineWireEnd(WIRE, os.dup(memory), ours)
    worker = ShmWorkerWireEnd(WIRE, memory, theirs)
    yield engine, worker
    engine.close()
    worker.close()


TOKEN = st.integers(0, 2**31 - 1)
EPOCH = st.integers(0, 2**62)
LOGPROBS = st.builds(
    TokenLogprobs, st.floats(-100, 0), st.integers(1, 10**6), st.lists(st.tuples(TOKEN, st.floats(-100, 0)), max_size=3)
)


def events_of(slot: int) -> st.SearchStrategy:
    count = st.integers(0, 10**6)
    optional = st.none() | st.lists(LOGPROBS, min_size=1, max_size=2)
    return st.one_of(
        st.none(),
        st.builds(SlotAdvanced, st.just(slot), EPOCH, count, optional),
        st.builds(
            SlotTokens,
            st.just(slot),
            EPOCH,
            count,
            count,
            st.lists(TOKEN, min_size=1, max_size=5),
            optional,
            optional,
            st.booleans(),
            st.integers(0, 16),
            st.lists(TOKEN, max_size=4),
        ),
        st.builds(SlotPreempted, st.just(slot), EPOCH, count),
        st.builds(SlotEmbedding, st.just(slot), EPOCH, count, st.binary(max_size=64)),
        st.builds(SlotFailed, st.just(slot), EPOCH, st.text(max_size=9), st.text(max_size=50)),
    )


@settings(max_examples=200, deadline=None)
@given(st.tuples(*(events_of(slot) for slot in range(8))))
def test_every_event_survives_the_rows(events: tuple) -> None:
    spoken = [event for event in events if event is not None]
    cells, side = shm_rows.encode(spoken, 8, 5)
    assert shm_rows.decode(cells.tolist(), side, 5) == spoken


def test_a_silent_slot_says_nothing_and_token_zero_is_a_token() -> None:
    cells, side = shm_rows.encode([SlotTokens(2, 0, 0, 0, [0])], 8, 5)
    assert shm_rows.decode(cells.tolist(), side, 5) == [SlotTokens(2, 0, 0, 0, [0])]


def test_hello_plans_and_results_cross_in_order(ends: tuple[ShmEngineWireEnd, ShmWorkerWireEnd]) -> None:
    engine, worker = ends
    worker.send(HELLO)
    assert engine.receive() == HELLO
    assert engine.receive() is None
    for step in range(7, 50, 2):
        plans = [msgspec.structs.replace(PLAN, step=step), StepPlan(step + 1)]
        for plan in plans:
            engine.send(plan)
        assert [worker.receive(), worker.receive()] == plans
        assert worker.receive() is None
        results = [StepResult(step, [SlotTokens(1, 3, step, 9, [step])], 0.25), StepResult(step + 1, [])]
        for result in results:
            worker.send(result)
        assert [engine.receive(), engine.receive()] == results


def test_a_result_that_was_not_finished_is_never_read(ends: tuple[ShmEngineWireEnd, ShmWorkerWireEnd]) -> None:
    engine, worker = ends
    engine.send(StepPlan(1))
    worker.receive()
    worker.send(StepResult(1, [SlotTokens(0, 1, 0, 1, [5])]))
    ring = worker._ring
    at = ring.entry_offset(1) + ring.layout.rows_at
    ring.memory[at] ^= 1
    with pytest.raises(WorkerWireBroken, match="damaged"):
        engine.receive()


def test_a_doorbell_without_a_result_is_a_broken_wire(ends: tuple[ShmEngineWireEnd, ShmWorkerWireEnd]) -> None:
    engine, worker = ends
    engine.send(StepPlan(1))
    worker.receive()
    worker._ring.ring_doorbell()
    with pytest.raises(WorkerWireBroken, match="not there"):
        engine.receive()


def test_more_steps_than_places_are_refused(ends: tuple[ShmEngineWireEnd, ShmWorkerWireEnd]) -> None:
    engine, _ = ends
    for step in range(1, NUM_RING_ENTRIES + 1):
        engine.send(StepPlan(step))
    with pytest.raises(AssertionError, match="in flight"):
        engine.send(StepPlan(NUM_RING_ENTRIES + 1))


def test_a_worker_killed_while_it_writes_leaves_nothing_half_read() -> None:
    """A real process writes results without end and is killed at some moment; what the engine reads is always whole."""
    for attempt in range(5):
        memory, ours, theirs = shm_wire.create_ring(WIRE)
        engine = ShmEngineWireEnd(WIRE, os.dup(memory), ours)
        pid = os.fork()
        if pid == 0:
            worker = ShmWorkerWireEnd(WIRE, memory, theirs)
            theirs.setblocking(True)
            while True:
                plan = worker.receive()
                assert plan is not None
                worker.send(
                    StepResult(plan.step, [SlotTokens(s, plan.step, plan.step, 1, [plan.step] * 5) for s in range(8)])
                )
        theirs.close()
        os.close(memory)
        ours.setblocking(True)
        for step in range(1, 40 + attempt):
            engine.send(StepPlan(step))
            result = engine.receive()
            assert result == StepResult(step, [SlotTokens(s, step, step, 1, [step] * 5) for s in range(8)])
        engine.send(StepPlan(40 + attempt))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        last = engine.receive()
        assert last is None or last.step == 40 + attempt
        assert engine.receive() is None
        engine.close()


def test_a_plan_for_a_worker_that_has_just_died_is_nobody_s_fault(
    ends: tuple[ShmEngineWireEnd, ShmWorkerWireEnd],
) -> None:
    """The supervisor will tell the engine; until then there may be something to plan."""
    engine, worker = ends
    worker._ring.doorbell.close()
    engine.send(StepPlan(1))
    engine.send(StepPlan(2))
    assert engine.receive() is None
