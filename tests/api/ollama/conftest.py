from collections.abc import Iterator

import ollama
import pytest

from tests.api.instance import Instance
from tests.api.responses.conftest import http, keeper, shared_keeper, shared_two, thinker, two

__all__ = ["client", "http", "keeper", "shared_keeper", "shared_two", "thinker", "two"]


@pytest.fixture
def client(keeper: Instance) -> Iterator[ollama.Client]:
    with ollama.Client(host=keeper.url, timeout=30) as client:
        yield client
