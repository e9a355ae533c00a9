"""How long an output becomes when the request does not say: as in OpenAI's completions, and unlimited in chats."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from onward.config import ApiConfig
from onward.proto.model import PreparedModel
from tests.api.instance import Instance, running
from tests.api.small_model import EOS
from tests.api.stand_in_engine import hashed_token

PROMPT = {"model": "small-model", "seed": 7}
COMPLETION = PROMPT | {"prompt": [5, 6, 7]}
TOKENS = PROMPT | {"prompt_token_ids": [5, 6, 7]}
CHAT = PROMPT | {"messages": [{"role": "user", "content": "hi"}]}


def never_ending(*place: Any) -> int:
    token_id = hashed_token(*place)
    return token_id if token_id != EOS else token_id + 1


@pytest.fixture(scope="module")
def default_of_5(model: PreparedModel) -> Iterator[Instance]:
    with running(model, ApiConfig(default_max_tokens=5)) as instance:
        instance.engine.choose = never_ending
        yield instance


@pytest.fixture
def endless(instance: Instance) -> Iterator[Instance]:
    instance.engine.choose = never_ending
    yield instance
    instance.engine.choose = hashed_token


def ended(instance: Instance, path: str, body: dict[str, Any]) -> tuple[int, str]:
    response = httpx.post(f"{instance.url}{path}", json=body, timeout=30)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/generate", TOKENS)])
def test_completions_end_at_16_tokens_unless_the_request_or_the_server_says_otherwise(
    path: str, body: dict[str, Any], endless: Instance, default_of_5: Instance
) -> None:
    assert ended(endless, path, body) == (16, "length")
    assert ended(endless, path, body | {"max_tokens": 40}) == (40, "length")
    assert ended(endless, path, body | {"min_tokens": 20}) == (20, "length")
    assert ended(default_of_5, path, body) == (5, "length")


def test_a_chat_goes_on_to_the_end_of_the_context(endless: Instance, default_of_5: Instance) -> None:
    assert ended(endless, "/v1/chat/completions", CHAT)[0] > 16
    assert ended(default_of_5, "/v1/chat/completions", CHAT)[0] > 16


def test_each_of_several_completions_has_the_default(default_of_5: Instance) -> None:
    body = COMPLETION | {"prompt": [[5, 6], [7, 8, 9]], "n": 2}
    assert ended(default_of_5, "/v1/completions", body) == (20, "length")
