"""Processes of a prefill and a decode instance are killed and stopped at every moment of a handoff, under load.

Every client gets exactly the tokens that an undisturbed mixed instance gives, and afterwards neither side holds anything.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx
import pytest

from tests.e2e.pd_instances import (
    SMALL,
    Pair,
    backend_of,
    ended,
    handovers,
    kill_all,
    kill_instance,
    num_steps,
    open_things,
    run_disturbed,
    wait_for,
    wait_until_at_rest,
)
from tests.e2e.server import Server
from tests.e2e.streams import TOPICS, Stream, chat_body, run_streams

NUM_SHORT = 8
NUM_LONG = 4
LEASE_S = "2"
STALL_S = "8"
TIMEOUT_S = "10"
"""So long a prefill worker may hang before its engine's word that it is at work counts no more."""

fresh = count(1)
"""Salts that make a prompt new to every cache."""


def long_chat(index: int) -> dict[str, Any]:
    """A prompt of about 500 tokens: several steps, and many pages to push."""
    words = " and ".join(f"{TOPICS[(index + i) % len(TOPICS)]} {i}" for i in range(130))
    return chat_body(index, 10, messages=[{"role": "user", "content": f"{index}: {words}"}])


BODIES = [chat_body(i, 24) for i in range(NUM_SHORT)] + [long_chat(i) for i in range(NUM_LONG)]


def load() -> list[dict[str, Any]]:
    salt = f"salt-{next(fresh)}"
    return [body | {"cache_salt": salt} for body in BODIES]


def results(streams: list[Stream]) -> list[tuple]:
    return [stream.result() for stream in streams]


@pytest.fixture(scope="module")
def undisturbed() -> list[tuple]:
    with Server(*SMALL) as mixed:
        return results(run_streams(mixed.url, BODIES))


@pytest.fixture(
    scope="module", params=["shm", *(pytest.param(name, marks=pytest.mark.full) for name in ("tcp", "nixl"))]
)
def shared_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    decode = ("--local-prefill-tokens", "0", "--stall-timeout-s", STALL_S, "--kv-backend", request.param)
    with Pair("--lease-s", LEASE_S, "--handover-timeout-s", TIMEOUT_S, decode=decode) as pair:
        run_streams(pair.decode.url, load()[:2])
        yield pair


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """What its processes said is shown if the test fails."""
    begin = [len(server.log()) for server in shared_pair.both]
    yield shared_pair
    for server, start in zip(shared_pair.both, begin, strict=True):
        print(server.log()[start:] or server.log())
    shared_pair.heal()


def asked(pair: Pair) -> None:
    """The peer knows of prompts, and has not offered yet to compute all of them."""
    wait_for(lambda: handovers(pair.decode, "decode", "asked"), "a prompt that was asked for")


def granted(pair: Pair) -> None:
    wait_for(lambda: handovers(pair.decode, "decode", "granted"), "a grant")


def in_mid_transfer(pair: Pair) -> None:
    """A step has been computed for a peer, and it still waits for the rest."""
    before = num_steps(pair.prefill)
    wait_for(
        lambda: num_steps(pair.prefill) > before and handovers(pair.prefill, "prefill", "granted"), "a step and a grant"
    )


def after_ready(pair: Pair) -> None:
    """The decode engine is stopped while a prefill goes on, so what it is told is sent and not read."""
    granted(pair)
    pair.pause([pair.decode.pid("engine")])
    wait_for(lambda: handovers(pair.prefill, "prefill", "ready"), "a prefill that is ready")


MOMENTS: dict[str, Callable[[Pair], None]] = {
    "before the offer": asked,
    "after the grant": granted,
    "in mid-transfer": in_mid_transfer,
    "after ready": after_ready,
}


def kill(server: Server, victim: str) -> None:
    if victim == "instance":
        kill_instance(server)
    else:
        os.kill(server.pid(victim), signal.SIGKILL)


def assert_works(pair: Pair, undisturbed: list[tuple]) -> None:
    """Nothing is left of the disturbance, and the two work together as before."""
    pair.wait_until_at_rest()
    before = ended(pair.decode, "arrived")

    def is_computed_by_the_peer() -> bool:
        assert results(run_streams(pair.decode.url, load()[:2])) == undisturbed[:2]
        return ended(pair.decode, "arrived") >= before + 2

    wait_for(is_computed_by_the_peer, "two prompts computed by the peer")
    pair.wait_until_at_rest()


def kill_prefill(pair: Pair, moment: str, victim: str, undisturbed: list[tuple]) -> None:
    def disturb() -> None:
        MOMENTS[moment](pair)
        kill(pair.prefill, victim)
        pair.resume()
        if victim == "instance":
            pair.start_prefill()

    assert results(run_disturbed(pair.decode.url, load(), disturb)) == undisturbed
    assert_works(pair, undisturbed)


@pytest.mark.parametrize(
    "moment, victim",
    [
        ("in mid-transfer", "worker"),
        ("in mid-transfer", "engine"),
        ("before the offer", "instance"),
        ("after ready", "instance"),
    ],
)
def test_streams_go_on_when_the_prefill_instance_loses_a_process(
    pair: Pair, undisturbed: list[tuple], moment: str, victim: str
) -> None:
    kill_prefill(pair, moment, victim, undisturbed)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["worker", "engine", "instance"])
@pytest.mark.parametrize("moment", [*MOMENTS])
def test_streams_go_on_when_the_prefill_instance_loses_a_process_again_and_again(
    pair: Pair, undisturbed: list[tuple], moment: str, victim: str
) -> None:
    for _ in range(3):
        kill_prefill(pair, moment, victim, undisturbed)


def stop_prefill(pair: Pair, roles: list[str], undisturbed: list[tuple]) -> None:
    """It is back, with what it had begun, when the decode instance has long gone on."""

    def disturb() -> None:
        in_mid_transfer(pair)
        pair.pause([pair.prefill.pid(role) for role in roles])

    def come_back() -> None:
        wait_for(lambda: pair.decode.metrics()['onward_requests{state="running"}'], "streams")
        pair.resume()

    assert results(run_disturbed(pair.decode.url, load(), disturb)) == undisturbed
    assert results(run_disturbed(pair.decode.url, load(), come_back)) == undisturbed, "late writes harm nobody"
    assert_works(pair, undisturbed)


@pytest.mark.parametrize(
    "roles",
    [
        pytest.param(["worker"], marks=pytest.mark.full),
        pytest.param(["engine"], marks=pytest.mark.full),
        ["supervisor", "api", "engine", "worker"],
    ],
    ids="+".join,
)
def test_streams_go_on_when_the_prefill_instance_is_stopped_for_a_while(
    pair: Pair, undisturbed: list[tuple], roles: list[str]
) -> None:
    stop_prefill(pair, roles, undisturbed)


def kill_decode(pair: Pair, moment: str, victim: str, undisturbed: list[tuple]) -> None:
    def disturb() -> None:
        MOMENTS[moment](pair)
        kill(pair.decode, victim)

    assert results(run_disturbed(pair.decode.url, load(), disturb)) == undisturbed
    assert_works(pair, undisturbed)


@pytest.mark.parametrize("victim", ["worker", "engine"])
def test_streams_go_on_when_the_decode_instance_loses_a_process(
    pair: Pair, undisturbed: list[tuple], victim: str
) -> None:
    kill_decode(pair, "in mid-transfer", victim, undisturbed)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["worker", "engine"])
@pytest.mark.parametrize("moment", ["before the offer", "after the grant", "in mid-transfer"])
def test_streams_go_on_when_the_decode_instance_loses_a_process_again_and_again(
    pair: Pair, undisturbed: list[tuple], moment: str, victim: str
) -> None:
    for _ in range(3):
        kill_decode(pair, moment, victim, undisturbed)


def test_streams_go_on_when_the_decode_worker_is_stuck(pair: Pair, undisturbed: list[tuple]) -> None:
    worker = pair.decode.pid("worker")

    def disturb() -> None:
        in_mid_transfer(pair)
        pair.pause([worker])

    assert results(run_disturbed(pair.decode.url, load(), disturb)) == undisturbed
    assert pair.decode.pid("worker") != worker
    assert_works(pair, undisturbed)


def test_streams_go_on_when_the_decode_engine_was_stopped_for_longer_than_a_lease(
    pair: Pair, undisturbed: list[tuple]
) -> None:
    def disturb() -> None:
        in_mid_transfer(pair)
        pair.pause([pair.decode.pid("engine")])
        wait_until_at_rest(pair.prefill)
        pair.resume()

    assert results(run_disturbed(pair.decode.url, load(), disturb)) == undisturbed
    assert_works(pair, undisturbed)


def test_a_prefill_instance_frees_all_that_a_killed_decode_instance_wanted(
    pair: Pair, undisturbed: list[tuple]
) -> None:
    def disturb() -> None:
        in_mid_transfer(pair)
        kill_instance(pair.decode)

    worker, backend = pair.prefill.pid("worker"), backend_of(pair)
    before = open_things(worker)
    with pytest.raises(httpx.TransportError):
        run_disturbed(pair.decode.url, load(), disturb)
    wait_until_at_rest(pair.prefill)
    wait_for(lambda: open_things(worker).num_fds < before.num_fds, "a closed connection")
    if backend == "shm":
        assert open_things(worker).num_mappings < before.num_mappings, "the dead peer's memory is let go of"
    assert pair.prefill.pid("worker") == worker
    pair.start_decode()
    assert_works(pair, undisturbed)


def leave(url: str, bodies: list[dict[str, Any]], when: Callable[[], None]) -> None:
    """All clients go away at that moment."""

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            asking = [
                asyncio.create_task(client.post("/v1/chat/completions", json=body | {"stream": True}))
                for body in bodies
            ]
            await asyncio.to_thread(when)
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(ask())


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("before the offer", marks=pytest.mark.full),
        pytest.param("after the grant", marks=pytest.mark.full),
        "in mid-transfer",
    ],
)
def test_clients_that_go_away_during_a_handoff_leave_nothing_on_either_side(
    pair: Pair, undisturbed: list[tuple], moment: str
) -> None:
    leave(pair.decode.url, load(), lambda: MOMENTS[moment](pair))
    assert_works(pair, undisturbed)


@pytest.mark.full
def test_deadlines_that_pass_during_a_handoff_leave_nothing_on_either_side(
    pair: Pair, undisturbed: list[tuple]
) -> None:
    bodies = [body | {"deadline_ms": 100 + 150 * index} for index, body in enumerate(load())]
    streams = run_streams(pair.decode.url, bodies)
    errors = [stream.error["code"] for stream in streams if stream.error is not None]
    assert errors
    assert set(errors) == {"deadline_exceeded"}
    assert_works(pair, undisturbed)


@pytest.mark.full
def test_an_api_process_that_is_killed_takes_its_handoffs_with_it(pair: Pair, undisturbed: list[tuple]) -> None:
    def disturb() -> None:
        in_mid_transfer(pair)
        kill(pair.decode, "api")

    with pytest.raises(httpx.TransportError):
        run_disturbed(pair.decode.url, load(), disturb)
    assert_works(pair, undisturbed)


@pytest.mark.full
def test_streams_go_on_when_the_prefill_instance_is_told_to_leave(pair: Pair, undisturbed: list[tuple]) -> None:
    def disturb() -> None:
        in_mid_transfer(pair)
        assert pair.prefill.stop() == 0
        assert pair.prefill.leftovers() == []

    assert results(run_disturbed(pair.decode.url, load(), disturb)) == undisturbed
    wait_until_at_rest(pair.decode)
    pair.start_prefill()
    assert_works(pair, undisturbed)


@pytest.mark.full
def test_streams_may_finish_after_the_decode_instance_was_told_to_leave(pair: Pair, undisturbed: list[tuple]) -> None:
    def disturb() -> None:
        in_mid_transfer(pair)
        assert pair.decode.stop() == 0
        assert pair.decode.leftovers() == []

    streams = run_disturbed(pair.decode.url, load(), disturb)
    for stream, whole in zip(streams, undisturbed, strict=True):
        if stream.error is None:
            assert stream.result() == whole
        else:
            assert stream.token_ids == whole[1][: len(stream.token_ids)]
    wait_until_at_rest(pair.prefill)
    pair.start_decode()
    assert_works(pair, undisturbed)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_streams_go_on_whatever_is_killed_or_stopped_at_whatever_moment(pair: Pair, undisturbed: list[tuple]) -> None:
    chance = random.Random(next(fresh))
    for number in range(12):
        deeds = [choose_deed(chance) for _ in range(chance.choice((1, 1, 2)))]
        print(f"round {number}: {deeds}")
        streams = run_disturbed(pair.decode.url, load(), lambda deeds=deeds: do_all(pair, deeds))
        assert results(streams) == undisturbed, deeds
        assert_works(pair, undisturbed)


@dataclass(frozen=True)
class Deed:
    after_s: float
    side: str
    victim: str
    stopped_s: float | None
    """None: killed."""


def choose_deed(chance: random.Random) -> Deed:
    side = chance.choice(("prefill", "prefill", "decode"))
    victims = ("worker", "engine", "instance") if side == "prefill" else ("worker", "engine")
    return Deed(
        chance.uniform(0, 3), side, chance.choice(victims), chance.choice((None, None, chance.uniform(0.1, 4.0)))
    )


def do_all(pair: Pair, deeds: list[Deed]) -> None:
    for deed in deeds:
        do(pair, deed)


def do(pair: Pair, deed: Deed) -> None:
    time.sleep(deed.after_s)  # the moment is left to chance
    server = pair.prefill if deed.side == "prefill" else pair.decode
    pids = wait_for(server.pids if deed.victim == "instance" else lambda: [server.pid(deed.victim)], "its pids")
    if deed.stopped_s is not None:
        pair.pause(pids)
        time.sleep(deed.stopped_s)
        pair.resume()
    else:
        kill_all(pids)
        if deed.victim == "instance":
            pair.start_prefill()
