"""A model without a chat template: chats get a 400 that says so, and everything else works."""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from onward.config import ApiConfig
from onward.proto.model import PreparedModel
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def plain_instance(model: PreparedModel) -> Iterator[Instance]:
    with running(msgspec.structs.replace(model, chat_template=None), ApiConfig()) as instance:
        yield instance


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
        ("/v1/responses", {"input": "hi"}),
        ("/tokenize", {"messages": MESSAGES}),
    ],
)
def test_a_chat_gets_a_400_that_names_the_flag(plain_instance: Instance, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(
        plain_instance.url + path, json={"model": "small-model"} | body, timeout=30, verify=NO_CERTIFICATES
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "chat is disabled: this model has no chat template" in error["message"]
    assert "--chat-template" in error["message"]


def test_completions_work(plain_instance: Instance) -> None:
    body = {"model": "small-model", "prompt": "x", "max_tokens": 2}
    answer = httpx.post(plain_instance.url + "/v1/completions", json=body, timeout=30, verify=NO_CERTIFICATES)
    assert answer.status_code == 200
