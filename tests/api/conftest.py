from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from onward.config import ApiConfig
from onward.proto.model import PreparedModel
from tests.api import small_model
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES
from tests.api.stand_in_engine import hashed_token, never, never_complete

MAX_BODY_BYTES = 1 << 20


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return small_model.prepare(Path(tmp_path_factory.mktemp("small-model")))


@pytest.fixture(scope="session")
def shared_instance(model: PreparedModel) -> Iterator[Instance]:
    config = ApiConfig(cors_origin=("https://example.org",), max_body_bytes=MAX_BODY_BYTES, serve_config={"port": 0})
    with running(model, config) as instance:
        yield instance


@pytest.fixture
def instance(shared_instance: Instance) -> Iterator[Instance]:
    """One api process for all tests; each finds the engine as if it were new, and must leave nothing in it."""
    yield shared_instance
    engine = shared_instance.engine
    has_refused = engine.refusal is not None
    engine.choose, engine.refusal, engine.give_up, engine.paused = hashed_token, None, never, False
    engine.is_complete = never_complete
    shared_instance.worker_ready, shared_instance.stalled_s = True, 0.0
    # What a test has left is aborted a moment later, and the next one's rules are not about it.
    shared_instance.wait_until(lambda: not engine.running)
    if has_refused:
        _wait_until_served(shared_instance)


def _wait_until_served(instance: Instance) -> None:
    """A full queue is remembered for a moment."""
    body = {"model": "small-model", "prompt": "x", "max_tokens": 1}
    for _ in range(10_000):
        if httpx.post(instance.url + "/v1/completions", json=body, timeout=30, verify=NO_CERTIFICATES).is_success:
            return
    raise AssertionError("a full queue is remembered for ever")


@pytest.fixture
def client(instance: Instance) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{instance.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client
