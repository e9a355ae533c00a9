"""Keys of several tenants at one instance with two api processes and two routers in front, all of them real processes:
each sees its own streams only, wherever they were begun, and limits hold wherever it asks."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from onward.web.auth.owned_request_ids import make_owned_id
from tests.e2e.answers import GREEDY, MODEL, USAGE, Hearing, Question, ask, chat, listen
from tests.e2e.pd_instances import wait_for
from tests.e2e.tenants import KEYS, Estate, abort, client_of, listening, refusals, status_of, stopped

QUESTION = chat("one", 1, 48, **GREEDY, **USAGE)
OTHER = chat("another", 2, 48, temperature=0.9, seed=5, **USAGE)
LONG = chat("long", 3, 600, **GREEDY, **USAGE)
"""Runs until it is ended."""
SHORT = Question("short", QUESTION.path, {**QUESTION.body, "stream": False, "max_tokens": 2, "stream_options": None})

RESPONSE = {"model": MODEL, "input": "hi", "max_output_tokens": 2}
JSON = {"Content-Type": "application/json"}
NUM_PADDED, PADDING = 19, b" " * (7 << 20)
"""Together more than each of the stores holds."""


@pytest.fixture(scope="module")
def shared_estate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Estate]:
    estate = Estate(tmp_path_factory.mktemp("estate"))
    try:
        yield estate
    finally:
        estate.close()


@pytest.fixture
def estate(shared_estate: Estate) -> Estate:
    shared_estate.clear()
    return shared_estate


@pytest.fixture(scope="module")
def expected(shared_estate: Estate) -> dict[str, Any]:
    """By question, undisturbed."""

    async def answers() -> dict[str, Any]:
        async with client_of(shared_estate.instance.url, "boss") as client:
            return {one.name: await ask(client, one) for one in (QUESTION, OTHER)}

    return asyncio.run(answers())


async def assert_unknown_to_bob(url: str, hearing: Hearing, label: str) -> None:
    """Whichever way he asks, in the words for one that never was."""
    assert hearing.place is not None
    request_id = hearing.place.split(";")[1]
    never = hearing.place.replace(request_id, make_owned_id("ab" * 16, "ann"))
    told = await refusals(url, "bob", QUESTION, hearing.place)
    assert [status for status, _ in told] == [404, 404]
    assert told == await refusals(url, "bob", QUESTION, never)
    names = [request_id, f"chatcmpl-{request_id}", label]
    assert await abort(url, "bob", *names) == {"aborted": [], "unknown": names}


async def rest_of(url: str, name: str, question: Question, hearing: Hearing) -> dict[str, Any]:
    hearing.lose_connection()
    async with client_of(url, name) as client:
        assert await listen(client, "GET", question, hearing) == 200
    return hearing.answer()


def test_a_stream_left_in_one_api_process_goes_on_in_the_other_for_its_owner_alone(
    estate: Estate, expected: dict[str, Any]
) -> None:
    first, second = estate.pids("api")

    async def scenario(here: int, there: int) -> None:
        hearing = Hearing()
        with stopped(there):
            async with listening(estate.instance.url, "ann", QUESTION, hearing, "mine") as hear:
                await hear(5)
                with estate.still():
                    os.kill(there, signal.SIGCONT)
                    for other in (here, there):
                        with stopped(other):
                            await assert_unknown_to_bob(estate.instance.url, hearing, "mine")
        await asyncio.to_thread(estate.wait_for_record)
        with stopped(here):
            await assert_unknown_to_bob(estate.instance.url, hearing, "mine")
            assert await rest_of(estate.instance.url, "ann", QUESTION, hearing) == expected[QUESTION.name]

    asyncio.run(scenario(first, second))
    estate.clear()
    asyncio.run(scenario(second, first))


def test_a_stream_left_at_one_router_goes_on_at_the_other_for_its_owner_and_an_admin_alone(
    estate: Estate, expected: dict[str, Any]
) -> None:
    here, there = (router.url for router in estate.routers)

    async def scenario(name: str) -> None:
        hearing = Hearing()
        async with listening(here, "ann", QUESTION, hearing, "mine") as hear:
            await hear(5)
            with estate.still():
                for url in estate.urls:
                    await assert_unknown_to_bob(url, hearing, "mine")
        await asyncio.to_thread(estate.wait_for_record)
        for url in estate.urls:
            await assert_unknown_to_bob(url, hearing, "mine")
        assert await rest_of(there, name, QUESTION, hearing) == expected[QUESTION.name]

    for name in ("ann", "boss"):
        estate.clear()
        asyncio.run(scenario(name))


def test_of_two_tenants_with_one_label_each_ends_its_own(estate: Estate, expected: dict[str, Any]) -> None:
    here, there = (router.url for router in estate.routers)

    async def scenario() -> None:
        of_ann, of_bob = Hearing(), Hearing()
        async with (
            listening(here, "ann", LONG, of_ann, "mine") as hear_ann,
            listening(there, "bob", OTHER, of_bob, "mine") as hear_bob,
        ):
            await hear_ann(2)
            await hear_bob(2)
            with estate.still():
                assert await abort(there, "ann", "mine") == {"aborted": ["mine"], "unknown": []}
            await hear_ann(None)
            await hear_bob(None)
        assert of_ann.error is None and of_ann.choices[0].finish_reasons == ["abort"]
        assert of_bob.answer() == expected[OTHER.name]

    asyncio.run(scenario())


def test_an_aborted_stream_whose_client_has_gone_does_not_come_back(estate: Estate) -> None:
    here = estate.routers[0].url

    async def scenario() -> None:
        hearing = Hearing()
        async with listening(here, "ann", QUESTION, hearing, "mine") as hear:
            await hear(5)
        await asyncio.to_thread(estate.wait_for_record)
        assert await abort(here, "ann", "mine") == {"aborted": ["mine"], "unknown": []}
        assert hearing.place is not None
        for url in estate.urls:
            async with client_of(url, "ann") as client:
                answer = await client.get(QUESTION.path, headers={"Last-Event-ID": hearing.place})
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "stream_unknown")

    asyncio.run(scenario())


def assert_refused(answer: httpx.Response, bound: str, least_s: int) -> None:
    assert answer.status_code == 429, answer.text
    error = answer.json()["error"]
    assert error["code"] == "rate_limited" and bound in error["message"]
    assert int(answer.headers["retry-after"]) >= least_s


def test_limits_of_a_key_hold_over_both_routers_and_both_api_processes(estate: Estate) -> None:
    direct, here, there = estate.urls

    async def short(url: str, name: str, **more: Any) -> httpx.Response:
        async with client_of(url, name) as client:
            return await client.post(SHORT.path, json={**SHORT.body, **more})

    async def scenario() -> None:
        async with (
            listening(here, "ann", LONG, Hearing(), "one"),
            listening(direct, "ann", LONG, Hearing(), "two"),
        ):
            with estate.still():
                for url in estate.urls * 2:
                    assert_refused(await short(url, "ann"), "max_in_flight", 1)
            assert (await short(there, "bob")).status_code == 200, "others are not held up"
            assert (await abort(there, "ann", "one", "two"))["aborted"] == ["one", "two"]
        for url in estate.urls:
            assert (await short(url, "ann")).status_code == 200, "what has ended makes room"
        used = await short(here, "cyd", max_tokens=40)
        assert used.status_code == 200 and used.json()["usage"]["completion_tokens"] == 40, "what runs is not cut"
        for url in estate.urls * 2:
            assert_refused(await short(url, "cyd"), "tokens_per_minute", 10)

    asyncio.run(scenario())


def statuses(estate: Estate, name: str) -> set[int]:
    """At both routers and, one after the other, in both api processes."""
    told = {status_of(router.url, name, "/version") for router in estate.routers}
    for other in estate.pids("api"):
        with stopped(other):
            told.add(status_of(estate.instance.url, name, "/version"))
    return told


def test_a_key_that_is_taken_out_is_refused_and_what_it_had_begun_goes_on(
    estate: Estate, expected: dict[str, Any]
) -> None:
    direct, here, _ = estate.urls

    async def scenario() -> None:
        by_router, by_hand, left = Hearing(), Hearing(), Hearing()
        async with listening(direct, "ann", QUESTION, left) as hear:
            await hear(5)
        async with (
            listening(here, "ann", QUESTION, by_router) as hear,
            listening(direct, "ann", OTHER, by_hand) as hear_by_hand,
        ):
            await hear(2)
            await hear_by_hand(2)
            with estate.still():
                estate.write_keys(*(name for name in KEYS if name != "ann"))
                await asyncio.to_thread(estate.hang_up, "action=reload_keys targets=3")
                wait_for(lambda: statuses(estate, "ann") == {401}, "doors that are closed to ann")
                assert statuses(estate, "bob") == {200}
                estate.keys.write_text("[[key]]\n")
                await asyncio.to_thread(estate.hang_up, "action=reload_keys targets=0 refused=")
                assert (statuses(estate, "ann"), statuses(estate, "bob")) == ({401}, {200})
            await hear(None)
            await hear_by_hand(None)
        assert (by_router.answer(), by_hand.answer()) == (expected[QUESTION.name], expected[OTHER.name])
        for url in estate.urls:
            async with client_of(url, "ann") as client:
                assert (await client.post(SHORT.path, json=SHORT.body)).status_code == 401
        assert await rest_of(here, "boss", QUESTION, left) == expected[QUESTION.name]

    try:
        asyncio.run(scenario())
    finally:
        estate.write_keys(*KEYS)
        estate.hang_up(f"action=reload_keys targets={len(KEYS)}")
        wait_for(lambda: statuses(estate, "ann") == {200}, "doors that are open again")


def test_a_killed_stream_store_disturbs_no_stream_and_the_next_one_keeps_what_is_left_later(
    estate: Estate, expected: dict[str, Any]
) -> None:
    direct = estate.instance.url

    async def left(hearing: Hearing) -> None:
        async with listening(direct, "ann", QUESTION, hearing) as hear:
            await hear(5)

    async def scenario() -> None:
        lost, running, later = Hearing(), Hearing(), Hearing()
        await left(lost)
        await asyncio.to_thread(estate.wait_for_record)
        async with listening(direct, "bob", OTHER, running) as hear:
            await hear(5)
            [shelf] = estate.pids("stream_store")
            os.kill(shelf, signal.SIGKILL)
            await hear(None)
        assert running.answer() == expected[OTHER.name]
        wait_for(lambda: estate.pids("stream_store") not in ([], [shelf]), "another shelf")
        assert lost.place is not None
        async with client_of(direct, "ann") as client:
            answer = await client.get(QUESTION.path, headers={"Last-Event-ID": lost.place})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "stream_unknown")
            lost.lose_connection()
            assert await listen(client, "POST", QUESTION, lost) == 200
        assert lost.answer() == expected[QUESTION.name], "the repeated POST does not need it"
        await left(later)
        assert await rest_of(direct, "ann", QUESTION, later) == expected[QUESTION.name]

    asyncio.run(scenario())


@pytest.mark.parametrize("at", [0, 1], ids=["instance", "router"])
def test_padded_bodies_of_one_tenant_remove_nothing_of_another(
    estate: Estate, expected: dict[str, Any], at: int
) -> None:
    url = estate.urls[at]
    [store] = estate.pids("stream_store")

    async def scenario() -> None:
        hearing = Hearing()
        async with listening(url, "ann", OTHER, hearing) as hear:
            await hear(5)
        await asyncio.to_thread(estate.wait_for_record)
        async with client_of(url, "bob") as bob, client_of(url, "ann") as ann:
            made = (await ann.post("/v1/responses", json=RESPONSE)).json()
            before_kb, evicted = memory_kb(store, "VmRSS"), stored(estate, "onward_stream_store_evicted_total")
            for _ in range(NUM_PADDED):
                asked = await bob.post("/v1/responses", content=json.dumps(RESPONSE).encode() + PADDING, headers=JSON)
                assert asked.status_code == 200, asked.text
                await leave(bob, json.dumps(QUESTION.body).encode() + PADDING)
            found = await ann.get(f"/v1/responses/{made['id']}")
            assert (found.status_code, found.json()) == (200, made)
        assert await rest_of(url, "ann", OTHER, hearing) == expected[OTHER.name]
        assert stored(estate, "onward_stream_store_evicted_total") == evicted
        assert stored(estate, "onward_stream_store_bytes") < len(PADDING)
        assert (memory_kb(store, "VmHWM") - before_kb) << 10 < 4 * len(PADDING)

    asyncio.run(scenario())


async def leave(client: httpx.AsyncClient, body: bytes) -> None:
    """A stream, as soon as it has begun."""
    async with client.stream("POST", QUESTION.path, content=body, headers=JSON) as response:
        assert response.status_code == 200, await response.aread()
        await anext(response.aiter_lines())


def memory_kb(pid: int, field: str) -> int:
    [line] = [one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith(f"{field}:")]
    return int(line.split()[1])


def stored(estate: Estate, metric: str) -> float:
    """The sum over all kinds of records."""
    return sum(value for key, value in estate.instance.server.metrics().items() if key.partition("{")[0] == metric)
