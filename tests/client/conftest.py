"""A real api process with a stand-in engine: one whose streams are kept, and one that makes them again from their seed."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from onward.config import ApiConfig
from onward.proto.model import PreparedModel
from tests.api import small_model
from tests.api.instance import Instance, running


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return small_model.prepare(Path(tmp_path_factory.mktemp("small-model")))


@pytest.fixture(scope="module")
def instance(model: PreparedModel) -> Iterator[Instance]:
    with running(model, ApiConfig()) as instance:
        yield instance


@pytest.fixture(scope="module")
def forgetful(model: PreparedModel) -> Iterator[Instance]:
    """Exact, and it keeps no stream: a repeated request makes the same tokens again."""
    with running(msgspec.structs.replace(model, quantization="int8"), ApiConfig(detach_ttl_s=0.0)) as instance:
        yield instance
