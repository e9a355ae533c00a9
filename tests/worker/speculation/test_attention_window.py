"""Sliding windows with drafts: blocks before the window are given up where only the model has KV in them."""

from typing import Any

import msgspec
import numpy as np

from onward.config import WorkerConfig
from onward.proto.model import LayerKind
from onward.proto.step import AssignSlot, RunSlot, SlotTokens
from onward.worker.speculation.draft_model_proposer import DraftModelProposerFactory
from onward.worker.speculation.ngram_proposer import NgramProposerFactory
from tests.worker.cuda.small_model import CONFIG, random_weights
from tests.worker.driver import Driver, prepared

WINDOW, BLOCK_SIZE = 8, 16
MODEL = prepared(msgspec.structs.replace(CONFIG, layers=(LayerKind(window=WINDOW),) * CONFIG.num_layers))
SETTINGS: dict[str, Any] = {
    "num_kv_blocks": 64,
    "max_num_seqs": 8,
    "max_model_len": 256,
    "block_size": BLOCK_SIZE,
    "threads": 1,
}
PROMPT = [5, 6, 7, 8, 9, 10] * 10


def new_driver() -> Driver:
    return Driver(MODEL, random_weights(MODEL.config), drafter=NgramProposerFactory(), **SETTINGS)


def start(driver: Driver) -> AssignSlot:
    request = driver.assign(0, PROMPT, room=60)
    driver.step(assign=[request], run=[RunSlot(0, request.slot_epoch, len(PROMPT) - 1)])
    return request


def next_tokens(driver: Driver, request: AssignSlot) -> SlotTokens:
    [event] = driver.step(run=[RunSlot(0, request.slot_epoch, 1, max_draft_tokens=4)])
    assert isinstance(event, SlotTokens)
    return event


def test_blocks_before_the_window_are_not_read_by_steps_that_verify_n_grams() -> None:
    """They may belong to another request by then, so the worker announces its window."""
    clean, dirty = new_driver(), new_driver()
    assert clean.runner.hello("w1", "e1").attention_window == WINDOW
    requests = [start(driver) for driver in (clean, dirty)]
    memory = dirty.runner.device.kv_memory
    assert memory is not None
    blocks = requests[1].block_ids[: (len(PROMPT) - WINDOW) // BLOCK_SIZE]
    memory.pool.kv.data.reshape(MODEL.config.num_layers, SETTINGS["num_kv_blocks"] + 1, -1)[:, blocks] = np.nan
    num_drafted = 0
    for _ in range(10):
        events = [next_tokens(driver, request) for driver, request in zip((clean, dirty), requests, strict=True)]
        assert events[0] == events[1]
        num_drafted += events[0].num_draft_tokens
    assert num_drafted > 0


def test_a_draft_model_keeps_all_blocks_for_layers_that_see_all_positions() -> None:
    drafter = DraftModelProposerFactory(MODEL, random_weights(MODEL.config), WorkerConfig(**SETTINGS), "itself")
    driver = Driver(MODEL, random_weights(MODEL.config), drafter=drafter, **SETTINGS)
    assert driver.runner.hello("w1", "e1").attention_window is None
