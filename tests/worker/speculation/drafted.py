"""Drives a runner whose plans permit drafts, the way an engine would: what it was given is computed and drawn."""

from collections.abc import Sequence
from typing import Any

from onward.proto.sampling_params import SamplingParams
from onward.proto.step import AssignSlot, RunSlot, SlotFailed, SlotTokens
from tests.worker.driver import Driver


def generate(
    driver: Driver, requests: Sequence[AssignSlot], num_tokens: int, num_drafts: int
) -> list[list[SlotTokens]]:
    """The events of each request, until it has at least so many tokens."""
    for request in requests:
        driver.step(assign=[request])
        left = len(request.token_ids) - request.num_computed
        while left > 1:
            chunk = min(left - 1, driver.config.max_num_batched_tokens)
            driver.step(run=[RunSlot(request.slot, request.slot_epoch, chunk)])
            left -= chunk
    events: dict[int, list[SlotTokens]] = {request.slot: [] for request in requests}
    lengths = dict.fromkeys(events, 0)
    for _ in range(num_tokens):
        runs = []
        for request in requests:
            permitted = min(num_drafts, num_tokens - lengths[request.slot] - 1)
            if permitted >= 0:
                runs.append(RunSlot(request.slot, request.slot_epoch, 1, [], permitted))
        for event in driver.step(run=runs):
            if isinstance(event, SlotFailed):
                raise AssertionError(event)
            if isinstance(event, SlotTokens):  # else a mask was late
                assert event.position == lengths[event.slot]
                lengths[event.slot] += len(event.token_ids)
                events[event.slot].append(event)
    return [events[request.slot] for request in requests]


def tokens_of(events: Sequence[SlotTokens]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def output(
    driver: Driver, prompt: list[int], sampling: SamplingParams, num_tokens: int, **more: Any
) -> list[SlotTokens]:
    request = driver.assign(0, prompt, room=num_tokens + 1, sampling=sampling)
    [events] = generate(driver, [request], num_tokens, more.get("num_drafts", 4))
    driver.give_back(request.block_ids)
    return events
