"""Encodes slot events as integers: one row for each slot and step, with a side record for data that is not an integer.

    columns   epoch | position | num_computed | drafted | count | ids ...
    drafted   number of draft tokens that were verified, accepted or not
    count     NO_TOKEN            this slot was not run; the other cells have no meaning
              0                   KV was computed, no token yet
              n > 0               n tokens, in the cells that follow
              PREEMPTED_TOKEN_ID  the preempt of this epoch was executed; num_computed is the length of the token list
              FAILED              the side record has the error
              EMBEDDED            the side record has the vector

These codes are private to this module: both ends of the wire exchange typed events.
"""

import struct
from array import array
from collections.abc import Sequence

import msgspec

from onward.proto.field_types import Count, Serial
from onward.proto.step import (
    SlotAdvanced,
    SlotEmbedding,
    SlotEvent,
    SlotFailed,
    SlotPreempted,
    SlotTokens,
    TokenLogprobs,
)

NO_TOKEN = -1
PREEMPTED_TOKEN_ID = -9
FAILED = -5
EMBEDDED = -7

NUM_FIXED_COLUMNS = 5
CELL_BYTES = 8
_PLAIN_ROW = struct.Struct("=6q")


class RowExtras(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Data of one slot that does not fit into its row."""

    slot: Count
    slot_epoch: Serial
    code: str | None = None
    message: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    grammar_done: bool = False
    vector: bytes | None = None
    draft_token_ids: list[Count] = []

    @classmethod
    def from_tokens(cls, event: SlotTokens) -> "RowExtras | None":
        """Returns the side record of an event, or None if its row is enough, as for nearly every event."""
        has_more = event.logprobs is not None or event.prompt_logprobs is not None
        if not has_more and not event.grammar_done and not event.draft_token_ids:
            return None
        rest = (event.logprobs, event.prompt_logprobs, event.grammar_done, None, event.draft_token_ids)
        return cls(event.slot, event.slot_epoch, None, None, *rest)


_NOTHING = RowExtras(-1, -1)
_side_encoder = msgspec.msgpack.Encoder()
_side_decoder = msgspec.msgpack.Decoder(list[RowExtras])


def num_columns(max_tokens_per_row: int) -> int:
    return NUM_FIXED_COLUMNS + max_tokens_per_row


def encode(events: Sequence[SlotEvent], num_slots: int, max_tokens_per_row: int) -> tuple[array, bytes]:
    """Returns the rows of all slots as one flat array, and the encoded side records."""
    width = num_columns(max_tokens_per_row)
    cells = array("q", [0, 0, 0, 0, NO_TOKEN, *([0] * max_tokens_per_row)]) * num_slots
    extras: list[RowExtras] = []
    slots = {event.slot for event in events}
    assert len(slots) == len(events), "a slot has one event in a step"
    assert not slots or (min(slots) >= 0 and max(slots) < num_slots), "every slot has a row"
    row_bytes, pack_into = width * CELL_BYTES, _PLAIN_ROW.pack_into
    for event in events:
        # Nearly every row holds one token, which is packed without a list.
        if type(event) is SlotTokens and len(event.token_ids) == 1:
            [token] = event.token_ids
            offset = event.slot * row_bytes
            pack_into(
                cells, offset, event.slot_epoch, event.position, event.num_computed, event.num_draft_tokens, 1, token
            )
            if (record := RowExtras.from_tokens(event)) is not None:
                extras.append(record)
        else:
            offset, row = event.slot * width, array("q", _row(event, max_tokens_per_row, extras))
            cells[offset : offset + len(row)] = row
    return cells, _side_encoder.encode(extras) if extras else b""


def decode(cells: list[int], extras: bytes, max_tokens_per_row: int) -> list[SlotEvent]:
    """Returns the events of one step, in the order of their slots."""
    width = num_columns(max_tokens_per_row)
    records = {(r.slot, r.slot_epoch): r for r in _side_decoder.decode(extras)} if extras else {}
    events: list[SlotEvent] = []
    columns = (cells[column::width] for column in range(NUM_FIXED_COLUMNS + 1))
    for slot, (epoch, position, num_computed, drafted, count, first_id) in enumerate(zip(*columns, strict=True)):
        if count == NO_TOKEN:
            continue
        record = records.get((slot, epoch), _NOTHING) if records else _NOTHING
        if count == 1:
            ids = [first_id]
        else:
            ids = cells[slot * width + NUM_FIXED_COLUMNS : slot * width + NUM_FIXED_COLUMNS + max(count, 0)]
        if ids:
            events.append(_tokens(slot, epoch, position, num_computed, ids, record, drafted))
        else:
            events.append(_event_without_tokens(slot, epoch, num_computed, count, record))
    return events


def _tokens(
    slot: Count,
    epoch: Count,
    position: Count,
    num_computed: Count,
    token_ids: list[Count],
    record: RowExtras,
    drafted: Count,
) -> SlotTokens:
    if record is _NOTHING:
        return SlotTokens(slot, epoch, position, num_computed, token_ids, None, None, False, drafted)
    rest = (record.logprobs, record.prompt_logprobs, record.grammar_done, drafted, record.draft_token_ids)
    return SlotTokens(slot, epoch, position, num_computed, token_ids, *rest)


def _event_without_tokens(slot: int, epoch: int, num_computed: int, count: int, record: RowExtras) -> SlotEvent:
    if count == 0:
        return SlotAdvanced(slot, epoch, num_computed, record.prompt_logprobs)
    if count == PREEMPTED_TOKEN_ID:
        return SlotPreempted(slot, epoch, num_computed)
    if count == EMBEDDED:
        assert record.vector is not None, "an embedding is a vector"
        return SlotEmbedding(slot, epoch, num_computed, record.vector)
    assert count == FAILED, f"{count} is no code"
    assert record.code is not None and record.message is not None, "a failure says why"
    return SlotFailed(slot, epoch, record.code, record.message)


def _row(event: SlotEvent, max_tokens: int, extras: list[RowExtras]) -> list[int]:
    """Returns the cells of an event's row without the trailing zeros, and appends its side record to `extras`."""
    match event:
        case SlotTokens(_, epoch, position, num_computed, ids):
            assert 0 < len(ids) <= max_tokens, "the rows are as wide as a step can be"
            if (record := RowExtras.from_tokens(event)) is not None:
                extras.append(record)
            return [epoch, position, num_computed, event.num_draft_tokens, len(ids), *ids]
        case SlotAdvanced(slot, epoch, num_computed, prompt_logprobs):
            if prompt_logprobs is not None:
                extras.append(RowExtras(slot, epoch, prompt_logprobs=prompt_logprobs))
            return [epoch, 0, num_computed, 0, 0]
        case SlotPreempted(_, epoch, num_tokens):
            return [epoch, 0, num_tokens, 0, PREEMPTED_TOKEN_ID]
        case SlotEmbedding(slot, epoch, num_computed, vector):
            extras.append(RowExtras(slot, epoch, vector=vector))
            return [epoch, 0, num_computed, 0, EMBEDDED]
        case SlotFailed(slot, epoch, code, message):
            extras.append(RowExtras(slot, epoch, code, message))
            return [epoch, 0, 0, 0, FAILED]
