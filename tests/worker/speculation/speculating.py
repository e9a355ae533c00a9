"""Drives a runner that may draft, as the engine would, until every request has its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from onward.proto.step import AssignSlot, RunSlot, SlotTokens
from tests.worker.driver import Driver


@dataclass(slots=True)
class Spoken:
    outputs: list[list[int]]
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    per_position: dict[int, list[int]] = field(default_factory=dict)
    """For each place in a run of drafts: how often it was tried, how often right."""

    @property
    def acceptance(self) -> float:
        return self.num_accepted / max(1, self.num_drafted)

    def _note(self, event: SlotTokens) -> None:
        self.num_drafted += event.num_draft_tokens
        self.num_accepted += len(event.token_ids) - 1
        for place in range(event.num_draft_tokens):
            tried, right = self.per_position.setdefault(place, [0, 0])
            self.per_position[place] = [tried + 1, right + (place < len(event.token_ids) - 1)]


def speculate(driver: Driver, requests: Sequence[AssignSlot], num_tokens: int, num_drafts: int) -> Spoken:
    """All at once, each until it has `num_tokens` more."""
    for request in requests:
        left = len(request.token_ids) - request.num_computed
        driver.step(assign=[request])
        while left > 1:
            chunk = min(left - 1, driver.config.max_num_batched_tokens)
            driver.step(run=[RunSlot(request.slot, request.slot_epoch, chunk)])
            left -= chunk
    outputs: dict[int, list[int]] = {request.slot: [] for request in requests}
    given = {request.slot: len(request.token_ids) - request.num_prompt for request in requests}
    spoken = Spoken([])
    while running := [one for one in requests if len(outputs[one.slot]) < num_tokens]:
        spoken.num_steps += 1
        events = driver.step(run=[RunSlot(one.slot, one.slot_epoch, 1, max_draft_tokens=num_drafts) for one in running])
        assert len(events) == len(running)
        for event in events:
            assert isinstance(event, SlotTokens), event
            assert event.position == given[event.slot] + len(outputs[event.slot])
            outputs[event.slot] += event.token_ids
            spoken._note(event)
    spoken.outputs = [outputs[request.slot][:num_tokens] for request in requests]
    return spoken
