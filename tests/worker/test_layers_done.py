"""A thread that watches a forward pass never takes a layer for written before it is."""

import threading

import numpy as np
import pytest

from onward.models.loader.dummy_weights import DummyWeights
from onward.proto.step import RunSlot
from tests.worker import small_int8
from tests.worker.driver import Driver, prepared


def _driver(quantization: str) -> Driver:
    if quantization == "int8":
        return small_int8.driver(max_num_batched_tokens=120)
    config = small_int8.CONFIG
    settings = {"num_kv_blocks": 64, "max_num_seqs": 8, "max_model_len": 128, "max_num_batched_tokens": 120}
    return Driver(prepared(config), DummyWeights(config), **settings)


@pytest.mark.parametrize("quantization", ["int8", "none"])
def test_every_pass_adds_all_layers(quantization: str) -> None:
    driver = _driver(quantization)
    assert driver.runner.device.kv_memory.layers_done() == 0
    request = driver.assign(0, [5] * 40)
    driver.step(assign=[request], run=[RunSlot(0, request.slot_epoch, 30)])
    assert driver.runner.device.kv_memory.layers_done() == 2
    driver.step(run=[RunSlot(0, request.slot_epoch, 1)])
    assert driver.runner.device.kv_memory.layers_done() == 4


@pytest.mark.parametrize("quantization", ["int8", "none"])
def test_a_layer_that_is_done_does_not_change_any_more(quantization: str) -> None:
    driver = _driver(quantization)
    kv = driver.runner.device.kv_memory.pool
    layers = kv.data.reshape(2, -1)
    seen: list[tuple[int, np.ndarray]] = []
    over = threading.Event()

    def watch(before: int) -> None:
        taken = 0
        while taken < 2:
            is_over = over.is_set()
            done = driver.runner.device.kv_memory.layers_done() - before
            for layer in range(taken, done):
                seen.append((layer, layers[layer].copy()))
            taken = max(taken, done)
            if is_over:
                assert taken == 2
                return

    for slot in range(8):
        tokens = [(slot * i) % 97 for i in range(1 + 14 * slot)]
        request = driver.assign(slot, tokens)
        seen.clear()
        over.clear()
        watcher = threading.Thread(target=watch, args=(driver.runner.device.kv_memory.layers_done(),))
        watcher.start()
        driver.step(assign=[request], run=[RunSlot(slot, request.slot_epoch, len(tokens))])
        over.set()
        watcher.join()
        assert [layer for layer, _ in seen] == [0, 1]
        for layer, data in seen:
            np.testing.assert_array_equal(data, layers[layer])
        driver.give_back(request.block_ids)
