"""The load on a real api process: what is counted has really come."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.api.api_load import ApiLoad, check_whole, run
from onward.errors import ServerError
from tests.api import small_model
from tests.api.instance import Instance, running

ANSWER = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with running(small_model.prepare(Path(tmp_path_factory.mktemp("model")))) as instance:
        yield instance


def load_on(instance: Instance, *, stream: bool, max_tokens: int = 5) -> ApiLoad:
    port = int(instance.url.rpartition(":")[2])
    return ApiLoad(port, "small-model", num_connections=3, requests_each=2, max_tokens=max_tokens, stream=stream)


def test_every_token_of_every_stream_comes(instance: Instance) -> None:
    taken = asyncio.run(run(load_on(instance, stream=True)))
    assert taken.num_tokens == 3 * 2 * 5
    assert 6 <= taken.num_events <= taken.num_tokens


def test_answers_that_are_not_streamed_have_all_their_tokens_too(instance: Instance) -> None:
    taken = asyncio.run(run(load_on(instance, stream=False)))
    assert (taken.num_tokens, taken.num_events) == (30, 0)


def test_a_refusal_ends_the_load(instance: Instance) -> None:
    with pytest.raises(ServerError, match="max_tokens"):
        asyncio.run(run(load_on(instance, stream=True, max_tokens=100_000)))


def test_an_answer_that_lacks_tokens_is_noticed() -> None:
    load = ApiLoad(0, "m", 1, 1, max_tokens=3, stream=True)
    event = b"id: 1;r;0;1;1;2;0:7+8\ndata: {}\n\n"
    whole = ANSWER + event + b"id: 1;r;0;1;1;3:length;0:9\ndata: {}\n\n" + b'data: {"completion_tokens":3}\n\n'
    assert check_whole(whole, load).num_events == 2
    for broken in (whole.replace(event, b""), whole.replace(b"_tokens", b""), whole.replace(b":3}", b":4}")):
        with pytest.raises(ServerError):
            check_whole(broken, load)
