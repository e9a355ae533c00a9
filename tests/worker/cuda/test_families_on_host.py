"""Every family through the device's runner with plain operations, on the host, against transformers in float32."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from onward.errors import StartupError
from onward.models.device_support import IMPLEMENTED
from onward.proto.model import LayerKind, LinearRope, ModelConfig
from onward.proto.step import RunSlot
from tests.models import family_models
from tests.models.family_models import CASES, MAX_MODEL_LEN, FamilyModel
from tests.worker.cuda.small_model import CONFIG, SETTINGS, DeviceDriver, random_weights
from tests.worker.driver import Driver, prepared

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 90
"""Length of prompts: beyond every window and every original context."""
NUM_GREEDY = 64
LIMIT = 1e-4
CHUNKS = ([LENGTH], [7, 16, 1, 2, 64], [50] + [1] * 40)
LAYERS = (LayerKind(window=8, rope="local"), LayerKind())
NEWEST: dict[str, dict[str, Any]] = {
    "sinks": {"attention_sinks": True, "activation": "relu", "o_bias": True},
    "scaled-local-rope": {"layers": LAYERS, "local_rope_theta": 500.0, "local_rope_scaling": LinearRope(2.0)},
    "padded-head-norms": {"head_dim": 20, "norm_weight_offset": 0.5},
}
"""What no family of `CASES` has; small changes of a Qwen3."""


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest) -> FamilyModel:
    return family_models.make(request.param)


def driver(model: FamilyModel) -> DeviceDriver:
    return DeviceDriver(model.config, weights=model.tensors, max_model_len=MAX_MODEL_LEN, max_num_seqs=32)


def tokens(count: int = LENGTH) -> list[int]:
    return np.random.default_rng(3).integers(0, 199, count).tolist()


def error(ours: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(ours - expected).max() / np.abs(expected).max())


def test_logits_of_a_device_are_those_of_transformers_in_any_chunks(model: FamilyModel) -> None:
    token_ids, ours = tokens(), driver(model)
    expected = model.their_logits(token_ids)
    for chunks in CHUNKS:
        assert error(ours.logits(1, token_ids, chunks), expected) < LIMIT, chunks


def test_greedy_tokens_of_a_device_are_those_of_transformers(model: FamilyModel) -> None:
    ours = driver(model)
    requests = [ours.assign(slot, tokens(LENGTH - 30 * slot), room=NUM_GREEDY) for slot in range(2)]
    for request, output in zip(requests, ours.generate(requests, NUM_GREEDY), strict=True):
        whole = list(request.token_ids) + output
        assert output == model.their_logits(whole)[len(request.token_ids) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("name", NEWEST)
def test_logits_of_a_device_are_those_of_the_cpu_where_no_family_is_at_hand(name: str) -> None:
    config = msgspec.structs.replace(CONFIG, **NEWEST[name])
    settings = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": LENGTH}
    ours = DeviceDriver(config, weights=weights(config), **settings).logits(0, tokens(), [50, 1, 39])
    assert error(ours, cpu(config, **settings).logits(0, tokens(), [LENGTH])) < LIMIT


def weights(config: ModelConfig) -> dict[str, np.ndarray]:
    """Sinks as large as scores are."""
    found = random_weights(config).items()
    return {name: 3 * array if name.endswith("sinks") else array for name, array in found}


def cpu(config: ModelConfig, **settings: Any) -> Driver:
    return Driver(prepared(config), weights(config), threads=1, **(SETTINGS | settings))


def test_a_device_implements_every_field() -> None:
    optional = ModelConfig.__struct_fields__[-len(ModelConfig.__struct_defaults__) :]
    assert IMPLEMENTED["torch"] == set(optional)
    assert IMPLEMENTED["torch"] - IMPLEMENTED["cuda"] == {"experts", "clamped_swiglu"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 320}, "head_dim is 320"),
        ({"hidden_size": 68}, "hidden_size is 68"),
        ({"intermediate_size": 98}, "intermediate_size is 98"),
        ({"num_heads": 5}, "5 heads for 2 KV heads"),
    ],
)
def test_sizes_that_no_kernel_has_are_refused_by_name(changes: dict[str, int], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        DeviceDriver(msgspec.structs.replace(CONFIG, **changes), weights={})


def test_blocks_before_a_window_are_not_read() -> None:
    """They may belong to another request by then."""
    config = msgspec.structs.replace(CONFIG, layers=(LayerKind(window=8),) * 2)
    clean, dirty = (DeviceDriver(config, max_model_len=MAX_MODEL_LEN, max_num_seqs=32) for _ in range(2))
    assert clean.runner.hello("w1", "e1").attention_window == 8
    outputs = []
    for driver in (clean, dirty):
        request = driver.assign(0, tokens(60), room=20)
        driver.generate([request], 10)
        if driver is dirty:
            for kv in driver.torch_device._decoder._kv:
                kv[request.block_ids[: (70 - 8) // 16]] = torch.nan
        runs = [RunSlot(0, request.slot_epoch, 1)]
        outputs.append([driver.step(run=runs) for _ in range(8)])
    assert outputs[0] == outputs[1]
