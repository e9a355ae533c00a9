"""Faults of ours while a response is made in the background: told as such, and not met again with every question."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from onward.api.responses.response_store import BackgroundResponses
from onward.proto.model import PreparedModel
from onward.web.error_format import RequestFailed
from onward.web.task_pool import TaskPool
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES
from tests.api.responses.reading import ask, body_of
from tests.api.test_roles import until
from tests.api.thinking_model import speak, tokens_of

NUM_POLLS = 5
UNDER_WAY = ("queued", "in_progress")
UNCOUNTABLE = 1 << 62


class BreaksAtOnce:
    """In the place of a generator."""

    async def run(self, *_: Any) -> None:
        raise ZeroDivisionError


def test_a_fault_before_the_engine_has_taken_it_is_an_error_in_our_words() -> None:
    async def begin() -> None:
        nobody = cast(Any, None)
        prepared = cast(Any, SimpleNamespace(attempt=SimpleNamespace(caller="", request_id="r", client_request_id="")))
        await BackgroundResponses(cast(Any, BreaksAtOnce()), nobody, TaskPool()).start(prepared)

    with pytest.raises(RequestFailed) as failure:
        asyncio.run(begin())
    assert (failure.value.info.status, failure.value.info.code) == (500, "internal_error")


def test_a_response_that_meets_a_fault_has_failed_and_is_not_begun_again(thinker: PreparedModel) -> None:
    with running(thinker) as instance:
        speak(instance, tokens_of("one two three"))
        instance.engine.claimed_drafts = UNCOUNTABLE
        with httpx.Client(base_url=instance.url, timeout=30, verify=NO_CERTIFICATES) as http:
            begun = ask(http, "POST", json=body_of("words", background=True)).json()
            until(lambda: _status(http, begun["id"]) not in UNDER_WAY or _num_begun(instance) > 1)
            told = [_status(http, begun["id"]) for _ in range(NUM_POLLS)]
            assert (told, _num_begun(instance)) == (["failed"] * NUM_POLLS, 1)


def _status(http: httpx.Client, response_id: str) -> str:
    return ask(http, "GET", f"/{response_id}").json()["status"]


def _num_begun(instance: Instance) -> int:
    return len(instance.engine.submits)
