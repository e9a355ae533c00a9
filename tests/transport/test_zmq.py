"""Every message survives the wire unchanged, over real sockets."""

import asyncio
import math
from pathlib import Path

import msgspec
import zmq

from onward.proto import SCHEMA_VERSION
from onward.proto.engine import (
    Abort,
    ErrorInfo,
    FromEngine,
    HeldRequest,
    HeldRequestsReport,
    RequestAccepted,
    Submit,
    ToEngine,
    TokenDelta,
    TokenDeltas,
)
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import (
    AssignSlot,
    PreemptSlot,
    RunSlot,
    SlotAdvanced,
    SlotEmbedding,
    SlotFailed,
    SlotPreempted,
    SlotTokens,
    StepPlan,
    StepResult,
    WorkerHello,
)
from onward.transport.curve import make_private_address
from onward.transport.zmq_sockets import EngineClientSocket, SocketPoller

PLAN = StepPlan(
    7,
    preempt=[PreemptSlot(1, 5)],
    assign=[
        AssignSlot(0, 6, "r", [0, 5, 49151], 2, 0, [3, 9], SamplingParams(seed=-(2**63), top_k=3, end_token_ids=(2,)))
    ],
    run=[RunSlot(0, 6, 3), RunSlot(2, 4, 1, [17])],
)
RESULT = StepResult(
    7,
    [
        SlotPreempted(1, 5, 12),
        SlotTokens(0, 6, 0, 3, [0]),
        SlotAdvanced(3, 9, 64),
        SlotFailed(4, 2, "bad_logits", "NaN"),
        SlotEmbedding(5, 7, 3, b"\0\0\x80?"),
    ],
    busy_s=0.5,
)
HELLO = WorkerHello(SCHEMA_VERSION, "w", "e", 1, "f", 10, 16, 128, 100)
TO_ENGINE: list[ToEngine] = [
    Submit(1, "r-0", 1, [1, 0], SamplingParams(seed=2**63 - 1), [0], 1.5, 2.5, -1, "salt", 1, 16),
    Abort(2, "r-0", None),
    Abort(3, "r-0", 4, "stop", 0),
]
FROM_ENGINE: list[FromEngine] = [
    RequestAccepted("r-0", 1),
    TokenDeltas(
        3, [TokenDelta("r-0", 1, 0, [0], 2, 0), TokenDelta("r-1", 1, 4, [], 2, 0, "error", ErrorInfo("c", "m", 400))]
    ),
    HeldRequestsReport("e", 3, 4, [HeldRequest("r-0", 1, 5)]),
]


def receive(wires: SocketPoller, port):
    while (message := port.receive()) is None:
        wires.wait(5000)
    return message


def test_plans_results_and_hellos_cross_the_wire_unchanged(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/w.sock"
    engine, worker = SocketPoller(), SocketPoller()
    ours, theirs = engine.engine_wire_end(address), worker.worker_wire_end(address)
    theirs.send(HELLO)
    assert receive(engine, ours) == HELLO
    ours.send(PLAN)
    assert receive(worker, theirs) == PLAN
    theirs.send(RESULT)
    assert receive(engine, ours) == RESULT
    engine.close()
    worker.close()


def test_requests_and_deltas_cross_the_wire_unchanged(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/e.sock"
    engine = SocketPoller()
    port = engine.engine_server(address)

    async def api() -> list[FromEngine]:
        socket = EngineClientSocket(address, "api-1")
        for message in TO_ENGINE:
            assert socket.send(message)
        assert [receive(engine, port) for _ in TO_ENGINE] == [("api-1", message) for message in TO_ENGINE]
        for message in FROM_ENGINE:
            assert port.send("api-1", message)
        received = [await socket.receive() for _ in FROM_ENGINE]
        socket.close()
        return received

    assert asyncio.run(api()) == FROM_ENGINE
    engine.close()


def test_a_message_that_cannot_be_read_is_dropped_and_the_next_one_is_read(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/e.sock"
    engine = SocketPoller()
    port = engine.engine_server(address)
    good = Submit(2, "r", 1, [5], SamplingParams(7), waited_s=1.0)
    answer = RequestAccepted("r", 1)

    async def api() -> FromEngine:
        socket = EngineClientSocket(address, "api-1")
        for value in (math.nan, math.inf, -math.inf):
            assert socket.send(msgspec.structs.replace(good, waited_s=value))
        assert socket.send(good)
        assert receive(engine, port) == ("api-1", good)
        assert port.send("api-1", msgspec.structs.replace(answer, epoch=-1)) and port.send("api-1", answer)
        received = await socket.receive()
        socket.close()
        return received

    assert asyncio.run(api()) == answer
    engine.close()


def test_a_message_to_an_api_process_that_is_gone_is_refused_and_not_kept(tmp_path: Path) -> None:
    engine = SocketPoller()
    port = engine.engine_server(f"ipc://{tmp_path}/e.sock")
    assert not port.send("nobody", FROM_ENGINE[0])
    engine.close()


def test_nobody_without_the_key_gets_a_message_across() -> None:
    address, to_connect = make_private_address("test-keys")
    engine = SocketPoller()
    port = engine.engine_server(address)

    async def api() -> None:
        stranger = EngineClientSocket(to_connect.split("#")[0], "stranger")
        guesser = EngineClientSocket(to_connect[:-1] + ("0" if to_connect[-1] != "0" else "1"), "guesser")
        friend = EngineClientSocket(to_connect, "friend")
        for socket in (stranger, guesser, friend):
            socket.send(TO_ENGINE[1])
        assert receive(engine, port) == ("friend", TO_ENGINE[1])
        friend.send(TO_ENGINE[2])
        assert receive(engine, port) == ("friend", TO_ENGINE[2])
        for socket in (stranger, guesser, friend):
            socket.close()

    asyncio.run(api())
    engine.close()


def test_sending_never_hides_what_has_arrived(tmp_path: Path) -> None:
    """zmq tells of an arrival once; a send that swallowed it would leave the reader waiting for ever."""
    address = f"ipc://{tmp_path}/e.sock"
    engine = SocketPoller()
    port = engine.engine_server(address)

    async def api() -> int:
        socket = EngineClientSocket(address, "api-1")
        reader = asyncio.ensure_future(socket.receive())
        received = 0
        for _ in range(300):
            socket.send(TO_ENGINE[1])
            receive(engine, port)
            port.send("api-1", FROM_ENGINE[0])
            for _ in range(20):
                socket.send(TO_ENGINE[1])
            await asyncio.wait_for(reader, 5)
            received += 1
            for _ in range(20):
                receive(engine, port)
            reader = asyncio.ensure_future(socket.receive())
            await asyncio.sleep(0)
        reader.cancel()
        socket.close()
        return received

    assert asyncio.run(api()) == 300
    engine.close()


def test_a_plan_for_a_worker_that_has_just_died_is_nobody_s_fault(tmp_path: Path) -> None:
    """The supervisor will tell the engine; until then there may be something to plan."""
    address = f"ipc://{tmp_path}/w.sock"
    engine, worker = SocketPoller(), SocketPoller()
    ours, theirs = engine.engine_wire_end(address), worker.worker_wire_end(address)
    theirs.send(HELLO)
    assert receive(engine, ours) == HELLO
    worker.close()
    # zmq notices the end of the other side when it likes; from then on it takes nothing.
    while ours.pollable.poll(10, zmq.POLLOUT):
        pass
    ours.send(PLAN)
    assert ours.receive() is None
    engine.close()
