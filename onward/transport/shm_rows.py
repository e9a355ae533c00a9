"""Events as integers: one row for each slot and step, in coded cells, with a side record for what is no integer.

    columns   epoch | position | num_computed | count | ids ...
    count     NO_TOKEN            this slot was not run: the row says nothing
              0                   KV was computed, no token yet
              n > 0               n tokens, in the cells behind it
              PREEMPTED_TOKEN_ID  the preempt of this epoch was executed; num_computed holds the length of the list
              FAILED              see the side record

These meanings are shared by nothing else, and never leave this file: both ends speak typed events.
"""

from array import array
from collections.abc import Iterable

import msgspec

from onward.proto.step import Advanced, Event, Failed, Preempted, TokenLogprobs, Tokens

NO_TOKEN = -1
PREEMPTED_TOKEN_ID = -9
FAILED = -5

NUM_FIXED_COLUMNS = 4
CELL_BYTES = 8


class SideRecord(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one slot has to say beside its row."""

    slot: int
    epoch: int
    code: str | None = None
    message: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


_side_encoder = msgspec.msgpack.Encoder()
_side_decoder = msgspec.msgpack.Decoder(list[SideRecord])


def num_columns(max_tokens_per_row: int) -> int:
    return NUM_FIXED_COLUMNS + max_tokens_per_row


def encode(events: Iterable[Event], num_slots: int, max_tokens_per_row: int) -> tuple[array, bytes]:
    """The rows of all slots, flat, and the side records."""
    width = num_columns(max_tokens_per_row)
    silent = [0, 0, 0, NO_TOKEN, *([0] * max_tokens_per_row)]
    rows: list[list[int]] = [silent] * num_slots
    side: list[SideRecord] = []
    for event in events:
        assert rows[event.slot] is silent, "a slot has one event in a step"
        rows[event.slot] = _row(event, width, side)
    cells = array("q")
    for row in rows:
        cells.extend(row)
    return cells, _side_encoder.encode(side) if side else b""


def decode(cells: list[int], side: bytes, max_tokens_per_row: int) -> list[Event]:
    """The events of one step, in the order of their slots."""
    width = num_columns(max_tokens_per_row)
    records = {(r.slot, r.epoch): r for r in _side_decoder.decode(side)} if side else {}
    events: list[Event] = []
    for slot, at in enumerate(range(0, len(cells), width)):
        epoch, position, num_computed, count = cells[at : at + NUM_FIXED_COLUMNS]
        if count == NO_TOKEN:
            continue
        record = records.get((slot, epoch)) if records else None
        if count > 0:
            ids = cells[at + NUM_FIXED_COLUMNS : at + NUM_FIXED_COLUMNS + count]
            if record is None:
                events.append(Tokens(slot, epoch, position, num_computed, ids))
            else:
                events.append(Tokens(slot, epoch, position, num_computed, ids, record.logprobs, record.prompt_logprobs))
        elif count == 0:
            events.append(Advanced(slot, epoch, num_computed, record.prompt_logprobs if record else None))
        elif count == PREEMPTED_TOKEN_ID:
            events.append(Preempted(slot, epoch, num_computed))
        else:
            assert count == FAILED, f"{count} is no code"
            assert record is not None, "a failure says why"
            events.append(Failed(slot, epoch, record.code or "", record.message or ""))
    return events


def _row(event: Event, width: int, side: list[SideRecord]) -> list[int]:
    match event:
        case Tokens(slot, epoch, position, num_computed, ids, logprobs, prompt_logprobs):
            assert 0 < len(ids) <= width - NUM_FIXED_COLUMNS, "the rows are as wide as a step can be"
            if logprobs is not None or prompt_logprobs is not None:
                side.append(SideRecord(slot, epoch, logprobs=logprobs, prompt_logprobs=prompt_logprobs))
            row = [epoch, position, num_computed, len(ids), *ids]
        case Advanced(slot, epoch, num_computed, prompt_logprobs):
            if prompt_logprobs is not None:
                side.append(SideRecord(slot, epoch, prompt_logprobs=prompt_logprobs))
            row = [epoch, 0, num_computed, 0]
        case Preempted(_, epoch, num_tokens):
            row = [epoch, 0, num_tokens, PREEMPTED_TOKEN_ID]
        case Failed(slot, epoch, code, message):
            side.append(SideRecord(slot, epoch, code, message))
            row = [epoch, 0, 0, FAILED]
    return row + [0] * (width - len(row))
