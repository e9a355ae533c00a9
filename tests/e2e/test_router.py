"""A router in front of real instances: what clients get through it, and what they notice when something behind it fails.

The answers to compare with are an instance's own, undisturbed and without a router.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.answers import (
    CHAT,
    COME_BACK_PAUSE_S,
    COME_BACK_S,
    MODEL,
    USAGE,
    Hearing,
    Question,
    ask,
    ask_again_and_again,
    chat,
    listen,
    questions,
)
from tests.e2e.cluster import CALM, SMALL, Cluster, Instance, Router
from tests.e2e.pd_instances import wait_for, wait_until_at_rest
from tests.e2e.server import STOP_TIMEOUT_S

MAX_TOKENS = 64
ROUTER = ("--stall-timeout-s", "4", "--restart-grace-s", "3")
TOO_SMALL = ("--num-kv-blocks", "24", "--no-local-prefill", "--local-prefill-tokens", "0")
"""For 8 streams of 130 tokens."""

Answers = list[dict[str, Any]]


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with Cluster(router=ROUTER) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: Cluster) -> Iterator[Cluster]:
    """At rest before each test and after it, whatever the test does to it."""
    running.heal()
    yield running
    running.heal()
    running.wait_until_at_rest()


@pytest.fixture(scope="module")
def asked() -> list[Question]:
    return questions(MAX_TOKENS)


@pytest.fixture(scope="module")
def expected(running: Cluster, asked: list[Question]) -> Answers:
    return answers_of(running.of_role("decode")[0].url, asked)


def answers_of(url: str, asked: list[Question], disturb: Callable[[list[Hearing]], None] | None = None) -> Answers:
    """Asks all at once, while `disturb` runs."""
    hearings = [Hearing() for _ in asked]

    async def run() -> Answers:
        async with httpx.AsyncClient(base_url=url, timeout=180) as client, asyncio.TaskGroup() as group:
            asking = [group.create_task(ask(client, *one)) for one in zip(asked, hearings, strict=True)]
            if disturb is not None:
                await asyncio.to_thread(disturb, hearings)
        return [one.result() for one in asking]

    return asyncio.run(run())


def wait_for_tokens(hearings: list[Hearing], count: int) -> None:
    """Until the clients together have so many."""
    wait_for(lambda: sum(len(c.token_ids) for h in hearings for c in list(h.choices.values())) >= count, "tokens")


def salted(asked: list[Question], salt: str) -> list[Question]:
    return [question.salted(salt) for question in asked]


def test_every_kind_of_answer_equals_that_of_an_instance_without_a_router(
    cluster: Cluster, asked: list[Question], expected: Answers
) -> None:
    assert answers_of(cluster.url, salted(asked, "routed")) == expected


def test_the_openai_client_talks_to_a_router_as_to_an_instance(cluster: Cluster) -> None:
    messages: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    with openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        options: Any = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 20}
        whole = client.chat.completions.create(**options)
        assert "Paris" in (whole.choices[0].message.content or "")
        chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage is not None and whole.usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.chat.completions.create(**options | {"max_tokens": -1})


def test_an_abort_by_id_ends_the_stream_wherever_it_runs(cluster: Cluster) -> None:
    question, hearing = chat("endless", 3, 4000, temperature=0.0, **USAGE), Hearing()

    async def run() -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
            listening = asyncio.create_task(listen(client, "POST", question, hearing))
            await asyncio.to_thread(wait_for_tokens, [hearing], 3)
            [(response_id, *_)] = hearing.heads
            told = await client.post("/v1/abort", json={"ids": [response_id, "nobody"]})
            await listening
            return told.json()

    told = asyncio.run(run())
    assert (len(told["aborted"]), told["unknown"]) == (1, ["nobody"])
    assert hearing.error is None and hearing.done
    assert hearing.answer()["choices"][0]["finish_reasons"] == ["abort"]


def test_streams_go_on_when_their_instance_is_killed(
    cluster: Cluster, asked: list[Question], expected: Answers
) -> None:
    before = cluster.router.resumes("lost")

    def disturb(hearings: list[Hearing]) -> None:
        wait_for_tokens(hearings, 100)
        victim = cluster.with_stream(4)
        victim.kill("instance")

    assert answers_of(cluster.url, salted(asked, "killed"), disturb) == expected
    assert cluster.router.resumes("lost") >= before + 2


def test_nobody_notices_that_an_instance_is_drained_and_replaced(
    cluster: Cluster, asked: list[Question], expected: Answers
) -> None:
    before = cluster.router.resumes("drain")

    def disturb(hearings: list[Hearing]) -> None:
        wait_for_tokens(hearings, 100)
        victim = cluster.with_stream(4)
        assert onward_drain(victim) == 0
        victim.leave()
        victim.start_again()

    assert answers_of(cluster.url, salted(asked, "drained"), disturb) == expected
    assert cluster.router.resumes("drain") >= before + 2


def onward_drain(victim: Instance) -> int:
    return onward("drain", victim.url).returncode


def onward(*words: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, "-m", "onward.cli.main", *words], timeout=STOP_TIMEOUT_S, capture_output=True
    )


def test_status_tells_scripts_who_is_there_and_what_was_carried_on(cluster: Cluster, asked: list[Question]) -> None:
    def disturb(hearings: list[Hearing]) -> None:
        wait_for_tokens(hearings, 20)
        cluster.with_stream(1).kill("api")

    answers_of(cluster.url, salted(asked[:4], "status"), disturb)
    cluster.heal()
    told = json.loads(onward("status", cluster.url, "--json").stdout)
    assert told.keys() == {"instances", "resumes", "waiting"}
    assert {one["url"]: one["role"] for one in told["instances"]} == {i.url: i.role for i in cluster.instances}
    for one in told["instances"]:
        assert list(one) == [
            "id",
            "name",
            "node",
            "role",
            "model",
            "model_aliases",
            "state",
            "url",
            "incarnation",
            "load",
            "blocks",
            "streams",
            "pids",
            "oom_kills",
        ]
        itself = json.loads(onward("status", one["url"], "--json").stdout)
        assert (itself.keys(), itself["resumes"]) == (told.keys(), [])
        assert list(itself["instances"][0]) == list(one)
        for name in ("role", "state", "url", "incarnation", "pids"):
            assert itself["instances"][0][name] == one[name]
    assert {"request_id", "cause", "outcome", "from", "to", "positions", "pause_s", "ago_s"} == told["resumes"][
        -1
    ].keys()
    assert told["resumes"][-1]["cause"] in ("lost", "restart", "gone")


def test_a_client_comes_back_to_a_router_that_was_killed(
    cluster: Cluster, asked: list[Question], expected: Answers
) -> None:
    streamed = [(question, answer) for question, answer in zip(asked, expected, strict=True) if question.streams]
    hearings = [Hearing() for _ in streamed]

    def disturb() -> None:
        wait_for_tokens(hearings, 100)
        cluster.router.kill()
        cluster.router.start_again()

    async def run() -> list[tuple[dict[str, Any], int]]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client, asyncio.TaskGroup() as group:
            asking = [
                group.create_task(ask_again_and_again(client, question.salted("router"), hearing))
                for (question, _), hearing in zip(streamed, hearings, strict=True)
            ]
            await asyncio.to_thread(disturb)
        return [one.result() for one in asking]

    told = asyncio.run(run())
    assert [answer for answer, _ in told] == [answer for _, answer in streamed]
    assert sum(num_returns for _, num_returns in told) >= 1


@pytest.mark.full
@pytest.mark.parametrize("target", ["worker", "engine", "api", "instance"])
def test_streams_of_a_stopped_process_are_carried_on_elsewhere(
    cluster: Cluster, asked: list[Question], expected: Answers, target: Any
) -> None:
    before = cluster.router.resumes("stall")

    def disturb(hearings: list[Hearing]) -> None:
        wait_for_tokens(hearings, 100)
        victim = cluster.with_stream(4)
        victim.stop(target)
        wait_for(lambda: cluster.router.resumes("stall") > before, "a resume")

    assert answers_of(cluster.url, salted(asked, f"stopped {target}"), disturb) == expected


@pytest.mark.full
def test_a_prefill_instance_whose_worker_hangs_is_left_long_before_a_handoff_times_out(cluster: Cluster) -> None:
    """That would take a minute, and these clients have three quarters of one."""
    patient = [chat(f"{number}", number, 8, temperature=0.0, **USAGE) for number in range(4)]
    hasty = [chat(f"{number}", number, 8, temperature=0.0, deadline_ms=45_000, **USAGE) for number in range(4)]
    expected = answers_of(cluster.of_role("decode")[0].url, patient)
    for instance in cluster.of_role("prefill"):
        instance.stop("worker")
    assert answers_of(cluster.url, salted(hasty, "hangs")) == expected


@pytest.mark.full
def test_a_stream_that_waits_for_its_prompt_is_carried_on_when_its_own_worker_hangs(cluster: Cluster) -> None:
    """The prefill instance's word that it is at work hides nothing."""
    asked = [chat(f"{number}", number, 8, temperature=0.0, deadline_ms=45_000, **USAGE) for number in range(4)]
    first, other = cluster.of_role("decode")
    expected = answers_of(other.url, asked)
    first.stop("worker")
    assert answers_of(cluster.url, salted(asked, "own worker")) == expected


@pytest.mark.full
def test_all_instances_are_replaced_one_after_the_other_under_load(
    cluster: Cluster, asked: list[Question], expected: Answers
) -> None:
    def disturb(hearings: list[Hearing]) -> None:
        wait_for_tokens(hearings, 50)
        for victim in cluster.instances:
            victim.drain()
            wait_for(lambda victim=victim: cluster.router.streams_at(victim.url) == 0, "an empty instance")
            victim.leave()
            victim.start_again()
            cluster.wait_until_ready(victim)

    twice = salted(asked, "first") + salted(asked, "second")
    assert answers_of(cluster.url, twice, disturb) == expected * 2


def test_when_every_attempt_has_failed_the_stream_says_so_and_ends(cluster: Cluster) -> None:
    question = chat("endless", 4, 4000, temperature=0.0, **USAGE)
    urls = ",".join(instance.url for instance in cluster.instances)
    impatient = Router("--instances", urls, "--preempt-retry-count", "0")
    try:
        hearing = Hearing()

        def disturb() -> None:
            wait_for_tokens([hearing], 3)
            for instance in cluster.of_role("decode"):
                instance.kill("instance")

        async def run() -> None:
            async with httpx.AsyncClient(base_url=impatient.url, timeout=120) as client, asyncio.TaskGroup() as group:
                group.create_task(listen(client, "POST", question, hearing))
                await asyncio.to_thread(disturb)

        wait_for(lambda: impatient.server.get("/health"), "instances behind the second router")
        asyncio.run(run())
        assert hearing.error is not None
        assert (hearing.error["code"], hearing.error["retryable"]) == ("upstream_lost", True)
        assert hearing.done
    finally:
        impatient.close()


def test_more_requests_than_may_wait_are_told_when_to_come_back() -> None:
    async def run(url: str) -> httpx.Response:
        body = chat("overload", 1, 8).body
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            waiting = asyncio.create_task(client.post(CHAT, json=body))
            await asyncio.to_thread(wait_for, lambda: one_waits(router), "a request that waits")
            refused = await client.post(CHAT, json=body)
            waiting.cancel()
            await asyncio.wait((waiting,))
            return refused

    router = Router("--max-queue", "1")
    try:
        refused = asyncio.run(run(router.url))
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        wait_for(lambda: not one_waits(router), "a router without streams")
    finally:
        router.close()


def one_waits(router: Router) -> bool:
    return router.server.metrics()['onward_router_streams{state="waiting"}'] == 1


# An instance that is too small for its load gives streams up that it cannot take back by itself.


@pytest.fixture(scope="module")
def pressed() -> list[Question]:
    return [chat(f"{number}", number, 80, temperature=0.9, seed=number, **USAGE) for number in range(8)]


@pytest.fixture(scope="module")
def unpressed(running: Cluster, pressed: list[Question]) -> Answers:
    return answers_of(running.of_role("decode")[1].url, pressed)


@pytest.fixture(scope="module")
def tight() -> Iterator[Cluster]:
    with Cluster(router=ROUTER, every=(*SMALL, *CALM), decode=(TOO_SMALL,)) as cluster:
        yield cluster


def test_clients_do_not_notice_that_their_instance_is_too_small(
    tight: Cluster, pressed: list[Question], unpressed: Answers
) -> None:
    assert answers_of(tight.url, pressed) == unpressed
    assert tight.router.resumes("error") >= 1
    tight.wait_until_at_rest()


def test_without_retries_a_stream_that_was_given_up_is_continued_by_hand(
    tight: Cluster, pressed: list[Question], unpressed: Answers
) -> None:
    urls = ",".join(instance.url for instance in tight.instances)
    router = Router("--instances", urls, "--preempt-retry-count", "0")
    try:
        wait_for(lambda: router.server.get("/health"), "instances behind the second router")
        told = asyncio.run(continue_all_by_hand(router.url, pressed))
        assert [(said, token_ids) for said, token_ids, _ in told] == [
            (choice["said"], choice["token_ids"]) for answer in unpressed for choice in answer["choices"]
        ]
        assert sum(num_given_up for *_, num_given_up in told) >= 1
    finally:
        router.close()
    for instance in tight.instances:
        wait_until_at_rest(instance.server)


async def continue_all_by_hand(url: str, asked: list[Question]) -> list[tuple[str, list[int], int]]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        return await asyncio.gather(*(continue_by_hand(client, question) for question in asked))


async def continue_by_hand(client: httpx.AsyncClient, question: Question) -> tuple[str, list[int], int]:
    """With the tokens that each answer tells, until one ends otherwise. Returns the whole text, all tokens, and how often
    it was given up."""
    said, token_ids = "", list[int]()
    num_given_up = 0
    deadline_s = time.monotonic() + COME_BACK_S
    while time.monotonic() < deadline_s:
        hearing = Hearing(given=token_ids)
        body = question.body | ({"generated_token_ids": token_ids} if token_ids else {})
        if await listen(client, "POST", question._replace(body=body), hearing) != 200:
            await asyncio.sleep(COME_BACK_PAUSE_S)  # given up before its first token
            continue
        [choice] = hearing.choices.values()
        said += choice.said
        token_ids = choice.token_ids
        if choice.finish_reasons == ["length"]:
            assert hearing.usages[0]["completion_tokens"] == len(token_ids)
            return said, token_ids, num_given_up
        assert choice.finish_reasons == ["pd_reschedule"], hearing.error
        assert choice.completion_token_ids == token_ids
        num_given_up += 1
    raise AssertionError(f"still given up after {num_given_up} times")
