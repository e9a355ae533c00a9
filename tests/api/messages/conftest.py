from collections.abc import Iterator

import anthropic
import pytest

from tests.api.instance import Instance
from tests.api.responses.conftest import http, keeper, shared_keeper, shared_two, thinker, two

__all__ = ["client", "http", "keeper", "shared_keeper", "shared_two", "thinker", "two"]


@pytest.fixture
def client(keeper: Instance) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=keeper.url, api_key="none", max_retries=0, timeout=30) as client:
        yield client
