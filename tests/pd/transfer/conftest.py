from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.pd.transfer.instance import Instance


@pytest.fixture
def start() -> Iterator[Callable[..., Instance]]:
    """Makes instances, and closes them."""
    instances: list[Instance] = []

    def make(*args: Any, **kwargs: Any) -> Instance:
        instances.append(Instance(*args, **kwargs))
        return instances[-1]

    yield make
    for instance in instances:
        instance.close()
