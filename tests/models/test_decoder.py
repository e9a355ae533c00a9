"""The decoder against transformers, for small random models of each architecture."""

import numpy as np
import pytest

from onward.errors import StartupError
from onward.kernels.quantize import quantize_model
from onward.models.device_support import check_supported
from onward.proto.sampling_params import Pooling, SamplingParams
from onward.proto.step import RunSlot, SlotAdvanced, SlotEmbedding, SlotTokens
from tests.models import small_models
from tests.models.int8_reference import reference_logits
from tests.worker.driver import Driver, prepared

NAMES = ["llama", "llama-tied", "qwen2", "qwen3"]
LENGTH = 60


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> small_models.SmallModel:
    return small_models.make(request.param)


def _tokens(model: small_models.SmallModel, count: int = LENGTH) -> list[int]:
    return np.random.default_rng(3).integers(0, model.config.vocab_size, count).tolist()


@pytest.mark.parametrize("chunks", [[LENGTH], [1] * LENGTH, [7, 16, 1, 36], [33, 27]], ids=str)
def test_float32_logits_equal_those_of_transformers(model: small_models.SmallModel, chunks: list[int]) -> None:
    token_ids = _tokens(model)
    ours = Driver(prepared(model.config), model.tensors, threads=1).logits(3, token_ids, chunks)
    assert np.abs(ours - model.their_logits(token_ids)).max() < 1e-4


def test_float32_rows_of_one_batch_do_not_see_each_other(model: small_models.SmallModel) -> None:
    driver = Driver(prepared(model.config), model.tensors, threads=1)
    token_ids = _tokens(model)
    requests = [driver.assign(i, token_ids[i : 2 * i + 5], room=8) for i in range(6)]
    together = driver.generate(requests, 8)
    for request, output in zip(requests, together, strict=True):
        tokens = list(request.token_ids)
        for token in output:
            assert token == int(model.their_logits(tokens)[-1].argmax())
            tokens.append(token)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_floats_stay_close_to_float32(model: small_models.SmallModel, dtype: str) -> None:
    token_ids = _tokens(model)
    ours = Driver(prepared(model.config, dtype=dtype), model.tensors, threads=1).logits(0, token_ids, [LENGTH])
    exact = model.their_logits(token_ids)
    assert np.abs(ours - exact).max() < 0.1 * np.abs(exact).max()


def test_int8_logits_equal_a_plain_reference_of_the_scheme(model: small_models.SmallModel) -> None:
    token_ids = _tokens(model)
    arrays = dict(quantize_model(model.config, model.tensors))
    ours = Driver(prepared(model.config, quantization="int8"), arrays).logits(1, token_ids, [LENGTH])
    expected = reference_logits(model.config, arrays, token_ids)
    error = np.abs(ours - expected) / np.abs(expected).max()
    # Both round to int8 between the layers, where the last bit of a float can tip a value over.
    assert np.median(error) < 1e-3
    assert error.max() < 0.05


def test_int8_logits_have_the_same_bits_in_any_chunking_and_batch(model: small_models.SmallModel) -> None:
    token_ids = _tokens(model)
    arrays = dict(quantize_model(model.config, model.tensors))
    model8 = prepared(model.config, quantization="int8")
    whole = Driver(model8, arrays).logits(0, token_ids, [LENGTH])
    for chunks in ([1] * LENGTH, [17, 1, 30, 12], [40, 20]):
        np.testing.assert_array_equal(Driver(model8, arrays).logits(5, token_ids, chunks), whole)


def test_int8_follows_float32_closely_enough_to_generate(model: small_models.SmallModel) -> None:
    token_ids = _tokens(model)
    arrays = dict(quantize_model(model.config, model.tensors))
    ours = Driver(prepared(model.config, quantization="int8"), arrays).logits(0, token_ids, [LENGTH])
    exact = model.their_logits(token_ids)
    assert np.abs(ours - exact).mean() < 0.1 * np.abs(exact).std()


def test_a_step_past_the_prompt_samples_its_own_next_token(model: small_models.SmallModel) -> None:
    driver = Driver(prepared(model.config), model.tensors, threads=1)
    request = driver.assign(2, _tokens(model, 9), room=4)
    events = driver.step(assign=[request], run=[RunSlot(2, request.slot_epoch, 9)])
    expected = int(model.their_logits(request.token_ids)[-1].argmax())
    assert events == [SlotTokens(2, request.slot_epoch, 0, 9, [expected])]


@pytest.mark.parametrize(("field", "value"), [("hidden_size", 100), ("intermediate_size", 48)])
def test_sizes_that_the_kernels_cannot_handle_are_named(field: str, value: int) -> None:
    config = small_models.make("llama").config
    import msgspec

    with pytest.raises(StartupError, match=field):
        check_supported(msgspec.structs.replace(config, **{field: value}), "cpu int8")


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_equal_those_of_transformers(model: small_models.SmallModel, pooling: Pooling) -> None:
    token_ids = _tokens(model)
    states = model.their_outputs(token_ids)
    expected = states.mean(0) if pooling == "mean" else states[-1]
    ours = _vector(Driver(prepared(model.config), model.tensors, threads=1), token_ids, pooling, [LENGTH])
    assert np.abs(ours - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_int8_vectors_have_the_same_bits_in_any_chunking_and_are_close(
    model: small_models.SmallModel, pooling: Pooling
) -> None:
    token_ids = _tokens(model)
    driver = Driver(prepared(model.config, quantization="int8"), dict(quantize_model(model.config, model.tensors)))
    whole = _vector(driver, token_ids, pooling, [LENGTH])
    for chunks in ([1] * LENGTH, [17, 1, 30, 12]):
        np.testing.assert_array_equal(_vector(driver, token_ids, pooling, chunks), whole)
    states = model.their_outputs(token_ids)
    exact = states.mean(0) if pooling == "mean" else states[-1]
    assert np.dot(whole, exact) > 0.98 * np.linalg.norm(whole) * np.linalg.norm(exact)


def _vector(driver: Driver, token_ids: list[int], pooling: Pooling, chunks: list[int]) -> np.ndarray:
    request = driver.assign(0, token_ids, sampling=SamplingParams(seed=0, pooling=pooling))
    events = driver.step(assign=[request], run=[RunSlot(0, request.slot_epoch, chunks[0])])
    for count in chunks[1:]:
        assert isinstance(events[0], SlotAdvanced)
        events = driver.step(run=[RunSlot(0, request.slot_epoch, count)])
    driver.give_back(request.block_ids)
    [event] = events
    assert isinstance(event, SlotEmbedding)
    return np.frombuffer(event.vector, "<f4")
