from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from onward.proto.model import PreparedModel
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES
from tests.api.stand_in_engine import hashed_token, never, never_complete
from tests.api.thinking_model import prepare, thinking_instance


@pytest.fixture(scope="session")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return prepare(Path(tmp_path_factory.mktemp("thinking-model")))


@pytest.fixture(scope="session")
def shared_keeper(thinker: PreparedModel) -> Iterator[Instance]:
    with thinking_instance(thinker) as instance:
        yield instance


@pytest.fixture
def keeper(shared_keeper: Instance) -> Iterator[Instance]:
    """An instance whose model says what a test tells it to."""
    yield shared_keeper
    engine = shared_keeper.engine
    engine.choose, engine.is_complete, engine.give_up = hashed_token, never_complete, never
    engine.paused = False


@pytest.fixture(scope="session")
def http(shared_keeper: Instance) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared_keeper.url, timeout=30, verify=NO_CERTIFICATES) as http:
        yield http


@pytest.fixture
def client(keeper: Instance) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{keeper.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def pair(thinker: PreparedModel) -> Iterator[tuple[Instance, list[httpx.Client]]]:
    """Two api processes, and a client of each."""
    with running(thinker, num_api=2, has_own_ports=True) as instance:
        clients = [httpx.Client(base_url=one.url, timeout=30, verify=NO_CERTIFICATES) for one in instance.children]
        yield instance, clients
        for client in clients:
            client.close()


@pytest.fixture(scope="module")
def shared_two(thinker: PreparedModel) -> Iterator[list[Instance]]:
    with running(thinker, name="a") as one, running(thinker, name="b") as other:
        yield [one, other]


@pytest.fixture
def two(shared_two: list[Instance]) -> Iterator[list[Instance]]:
    """Two instances, for a router in front of them."""
    yield shared_two
    for instance in shared_two:
        instance.engine.paused, instance.engine.give_up = False, never
