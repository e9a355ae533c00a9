"""`/v1/embeddings`, at an instance and behind a router."""

import asyncio
import base64
import math
from array import array
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from onward.api.endpoints.embeddings import split_batches
from onward.api.requests.embedding_request import MAX_INPUTS
from onward.config import ApiConfig
from onward.proto.engine import ErrorInfo
from onward.proto.model import PreparedModel
from onward.router.instance_registry import InstanceState
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES
from tests.api.stand_in_engine import made_up_vector
from tests.router.harness import Router, running_router


def ask(url: str, **fields: Any) -> httpx.Response:
    body = {"model": "small-model"} | fields
    return httpx.post(url + "/v1/embeddings", json=body, timeout=30, verify=NO_CERTIFICATES)


def unit(numbers: list[float]) -> list[float]:
    length = math.hypot(*numbers)
    return [number / length for number in numbers]


def test_a_text_has_a_vector_of_length_one(instance: Instance) -> None:
    answer = ask(instance.url, input="abc").json()
    [one] = answer["data"]
    assert (one["object"], one["index"]) == ("embedding", 0)
    assert one["embedding"] == pytest.approx(unit(made_up_vector(b"abc", "mean")))
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert (answer["object"], answer["model"]) == ("list", "small-model")


@pytest.mark.parametrize("inputs", [["abc", "de"], [[97, 98, 99], [100, 101]]], ids=["texts", "token ids"])
def test_each_of_a_list_has_its_own_in_order(instance: Instance, inputs: list[Any]) -> None:
    told = ask(instance.url, input=inputs, normalize=False, pooling="last").json()["data"]
    assert [one["index"] for one in told] == [0, 1]
    assert [one["embedding"] for one in told] == [made_up_vector(b"abc", "last"), made_up_vector(b"de", "last")]


def test_dimensions_are_the_first_ones_and_the_rest_does_not_count(instance: Instance) -> None:
    [one] = ask(instance.url, input="abc", dimensions=2).json()["data"]
    assert one["embedding"] == pytest.approx(unit(made_up_vector(b"abc", "mean")[:2]))


def test_base64_is_float32(instance: Instance) -> None:
    [one] = ask(instance.url, input="abc", encoding_format="base64", normalize=False).json()["data"]
    assert array("f", base64.b64decode(one["embedding"])).tolist() == made_up_vector(b"abc", "mean")


def test_openai_s_client_reads_it(instance: Instance) -> None:
    with openai.OpenAI(api_key="none", base_url=instance.url + "/v1") as client:
        answer = client.embeddings.create(model="small-model", input=["abc", "de"])
    assert [one.embedding for one in answer.data] == [
        pytest.approx(unit(made_up_vector(text, "mean"))) for text in (b"abc", b"de")
    ]


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": ["a", [1]]}, "input[1]"),
    ({"input": [[1], [100_000]]}, "input[1][0]"),
    ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
    ({"input": "a" * 300}, "input"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": 10**6}, "dimensions"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ({"input": "a", "pooling": "max"}, "pooling"),
    ({"input": "a", "model": "other"}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=str)
def test_what_is_wrong_is_named(instance: Instance, fields: dict[str, Any], param: str) -> None:
    answer = ask(instance.url, **fields)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param
    assert not instance.engine.running


def test_a_list_as_long_as_openai_takes_goes_to_the_engine_piece_by_piece(instance: Instance) -> None:
    num_before = len(instance.engine.submits)
    texts = [f"text {number}" for number in range(MAX_INPUTS)]
    answer = ask(instance.url, input=texts).json()
    assert [one["index"] for one in answer["data"]] == list(range(MAX_INPUTS))
    for text, one in list(zip(texts, answer["data"], strict=True))[::97]:
        assert one["embedding"] == pytest.approx(unit(made_up_vector(text.encode(), "mean")))
    assert len(instance.engine.submits) - num_before == MAX_INPUTS
    assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 60))
def test_groups_have_all_texts_in_order_within_their_bounds(
    lengths: list[int], max_texts: int, max_tokens: int
) -> None:
    groups = list(split_batches(lengths, max_texts, max_tokens))
    assert [index for group in groups for index in group] == list(range(len(lengths)))
    for group in groups:
        assert 1 <= len(group) <= max_texts
        assert len(group) == 1 or sum(lengths[index] for index in group) <= max_tokens


def test_an_engine_that_dies_meanwhile_costs_nothing_but_time(instance: Instance) -> None:
    instance.engine.paused = True
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask, instance.url, input=["abc", "de"])
        instance.wait_until(lambda: len(instance.engine.running) == 2)
        instance.restart_engine()
        assert [one["index"] for one in asking.result(20).json()["data"]] == [0, 1]


def test_a_client_that_goes_leaves_nothing_behind(instance: Instance) -> None:
    instance.engine.paused = True
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            instance.url + "/v1/embeddings",
            json={"model": "small-model", "input": "abc"},
            timeout=httpx.Timeout(5, read=0.3),
            verify=NO_CERTIFICATES,
        )
    instance.wait_until(lambda: not instance.engine.running)


@asynccontextmanager
async def router_of(key: str, *instances: Instance) -> AsyncIterator[Router]:
    urls = ",".join(one.url for one in instances)
    async with running_router(instances=urls, cluster_key=key, settle_s=4.0) as router:
        serving = router.process.stream_runner
        async with asyncio.timeout(20.0):
            while len(serving.core.serving_instances(serving.clock.now_s())) < len(instances):
                await serving.wait_for_change(5.0)
        yield router


def test_a_router_asks_the_next_instance_if_one_is_lost(model: PreparedModel) -> None:
    key = "ab" * 32

    async def scenario(first: Instance, second: Instance) -> None:
        async with router_of(key, first, second) as router:
            first.engine.refusal = ErrorInfo("overloaded", "full", 429, True, retry_after_s=1.0)
            for _ in range(4):
                answer = await router.post({"model": "small-model", "input": "abc"}, path="/v1/embeddings")
                assert answer.status == 200
                assert answer.json["data"][0]["embedding"] == pytest.approx(unit(made_up_vector(b"abc", "mean")))
                pooled = (await router.post({"input": ["abc"], "task": "embed"}, path="/pooling")).json
                assert pooled["data"] == [
                    {"object": "pooling", "index": 0, "data": answer.json["data"][0]["embedding"]}
                ]
                assert (pooled["object"], pooled["id"][:5], pooled["model"]) == ("list", "pool-", "small-model")
            refused = await router.post({"model": "small-model", "input": ""}, path="/v1/embeddings")
            assert (refused.status, refused.json["error"]["param"]) == (400, "input")

    config = ApiConfig(cluster_key=key)
    with running(model, config, name="first") as first, running(model, config, name="second") as second:
        uvloop.run(scenario(first, second))


def test_a_router_keeps_to_the_deadline_and_says_when_to_come_back(model: PreparedModel) -> None:
    key, path = "ab" * 32, "/v1/embeddings"

    async def scenario(instance: Instance) -> None:
        async with router_of(key, instance) as router:
            instance.engine.paused = True
            late = await router.post({"model": "small-model", "input": "abc", "deadline_ms": 300}, path=path)
            assert (late.status, late.json["error"]["code"]) == (504, "deadline_exceeded")
            assert instance.engine.submits[-1].deadline_in_s is not None
            instance.engine.paused = False
            instance.engine.refusal = ErrorInfo("overloaded", "full", 429, True, retry_after_s=7.0)
            full = await router.post({"model": "small-model", "input": "abc"}, path=path)
            assert (full.status, full.headers["retry-after"]) == (429, "7")

    with running(model, ApiConfig(cluster_key=key)) as instance:
        uvloop.run(scenario(instance))


def test_a_router_asks_an_instance_that_restarts_its_engine(model: PreparedModel) -> None:
    key = "ab" * 32

    async def scenario(instance: Instance) -> None:
        async with router_of(key, instance) as router:
            instance.kill_engine()
            serving = router.process.stream_runner
            async with asyncio.timeout(20.0):
                while serving.core.serving_instances(serving.clock.now_s())[0].state is InstanceState.READY:
                    await serving.wait_for_change(5.0)
            body = {"model": "small-model", "input": "abc"}
            asking = asyncio.create_task(router.post(body, path="/v1/embeddings"))
            await asyncio.wait((asking,), timeout=0.5)
            instance.start_engine()
            assert (await asking).status == 200

    with running(model, ApiConfig(cluster_key=key)) as instance:
        uvloop.run(scenario(instance))
