"""The `id:` line of a stream's events: where the stream stands, and the tokens that this event adds.

A router follows a stream by these lines alone, without JSON, and a client sends the last one back as `Last-Event-ID`.

    1;5f0c9d3e…;1767225600;42;3;17,9:stop;0:19556+33
    │ │         │          │  │ │         └ new tokens: choice 0 got the ids 19556 and 33
    │ │         │          │  │ └ choice 0 is open at position 17; choice 1 finished at position 9, by a stop
    │ │         │          │  └ epoch
    │ │         │          └ seed
    │ │         └ when the request was created; also the clock of chat templates
    │ └ request id
    └ version of this format

    cursor     = "1" ";" stream ";" created ";" seed ";" epoch ";" choices ";" new-tokens
    stream     = request-id [ "~" trace-id ] [ "@" model-tag ]
    request-id = 1*128( ALPHA / DIGIT / "_" / "-" / "." )
    trace-id   = 32( DIGIT / %x61-66 )                   ; only of a sampled trace that its client began
    model-tag  = 8( DIGIT / %x61-66 )                    ; of the model, where the client asked for it by another name
    created    = number                                  ; seconds of Unix time, below 2^37
    seed       = [ "-" ] number                          ; -2^63 .. 2^64-1
    epoch      = number                                  ; below 2^63
    choices    = choice *( "," choice )                  ; at most 128, in the order of their index
    choice     = position [ ":" reason ]                 ; with a reason: finished
    reason     = 1*32( %x61-7A / "_" )
    new-tokens = [ advance *( "," advance ) ] / "usage"  ; "usage": this event has told it, all that is left is the end
    advance    = index ":" token-id *( "+" token-id )    ; each index once
    position, token-id                                   ; numbers below 2^31
    number     = "0" / ( %x31-39 *DIGIT )                ; one way to write each, so equal cursors are equal strings

A position counts the tokens of that choice with this event's included, so the first of k new tokens has the index
position - k. A line is ASCII without spaces, and at most `MAX_CURSOR_CHARS` long.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence

import msgspec

from onward.proto.field_types import Count, Serial, WallSecond, Word64

MAX_CURSOR_CHARS = 1 << 16
MAX_CHOICES = 128

_VERSION = "1"
_USAGE = "usage"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_TRACE_MARK = "~"
_MODEL_TAG = re.compile(r"[0-9a-f]{8}")
_MODEL_MARK = "@"
_REASON = re.compile(r"[a-z_]{1,32}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,19}")
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,19}")

# Nearly every event's line: one choice, open, and one new token. Numbers are a digit short of every limit.
_USUAL_LINE = re.compile(
    r"1;([A-Za-z0-9_.-]{1,128})(?:@([0-9a-f]{8}))?;(0|[1-9][0-9]{0,10});(0|-?[1-9][0-9]{0,17});(0|[1-9][0-9]{0,17})"
    r";([1-9][0-9]{0,8});0:(0|[1-9][0-9]{0,8})"
)


class ChoiceCursor(msgspec.Struct, frozen=True, array_like=True):
    position: Count
    finish_reason: str | None = None
    """None while the choice is open."""


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    seed: Word64
    attempt_epoch: Serial
    choices: list[ChoiceCursor]
    new_tokens: dict[Count, list[Count]] = {}
    """New tokens by choice, for choices that this event advances. No list is empty."""
    created_s: WallSecond = 0
    """Together with the seed, enough to generate the stream again if no process has it."""
    usage_sent: bool = False
    """Every choice has ended and the usage was sent: only the end marker is missing."""
    trace_id: str = ""
    """See `obs.trace_context.trace_id_in_cursor`."""
    model_tag: str = ""
    """`model_tag` of the model that made the tokens. Empty: the one that the request names."""


def model_tag(model: str) -> str:
    """Returns a short hash of a model's name. A cursor can contain it, whatever characters the name has."""
    return hashlib.blake2b(model.encode(), digest_size=4).hexdigest()


def is_request_id(text: str) -> bool:
    """Returns whether a cursor can contain the id. Ids that `format_cursor` gets must have passed this check."""
    return _REQUEST_ID.fullmatch(text) is not None


def format_cursor(cursor: Cursor) -> str:
    head = format_cursor_head(
        cursor.request_id,
        cursor.created_s,
        cursor.seed,
        cursor.attempt_epoch,
        trace_id=cursor.trace_id,
        model_tag=cursor.model_tag,
    )
    return head + format_cursor_tail(cursor.choices, cursor.new_tokens, usage_told=cursor.usage_sent)


def format_cursor_head(
    request_id: str, created_s: int, seed: int, epoch: int, *, trace_id: str = "", model_tag: str = ""
) -> str:
    """Returns the part of the cursor that is the same for all events of an attempt."""
    trace = f"{_TRACE_MARK}{trace_id}" if trace_id else ""
    model = f"{_MODEL_MARK}{model_tag}" if model_tag else ""
    return f"{_VERSION};{request_id}{trace}{model};{created_s};{seed};{epoch};"


def format_cursor_tail(
    choices: Sequence[ChoiceCursor], new_tokens: Mapping[int, Sequence[int]], *, usage_told: bool = False
) -> str:
    """Returns the part of the cursor after its head: the position of each choice, and the tokens that the event adds.
    This runs for every event of every stream, so it checks nothing; the fields are the server's own."""
    places = ",".join(
        [str(c.position) if c.finish_reason is None else f"{c.position}:{c.finish_reason}" for c in choices]
    )
    advances = ",".join([f"{index}:{'+'.join(map(str, ids))}" for index, ids in new_tokens.items()])
    return f"{places};{_USAGE if usage_told else advances}"


def parse_cursor(text: str) -> Cursor:
    """Parses a cursor that `format_cursor` has written. Raises `ValueError` with what is wrong with the line."""
    # Once for every event of every stream at a router: 2 µs instead of the 7 that the whole grammar takes.
    usual = _USUAL_LINE.fullmatch(text)
    if usual is None:
        return parse_cursor_slow(text)
    request_id, tag, created, seed, epoch, position, token_id = usual.groups()
    place, new_tokens = [ChoiceCursor(int(position))], {0: [int(token_id)]}
    return Cursor(request_id, int(seed), int(epoch), place, new_tokens, int(created), model_tag=tag or "")


def parse_cursor_slow(text: str) -> Cursor:
    """Parses any valid cursor. Raises `ValueError` for an invalid one."""
    if len(text) > MAX_CURSOR_CHARS:
        raise ValueError(f"the cursor is longer than {MAX_CURSOR_CHARS} characters")
    fields = text.split(";", 7)
    if fields[0] != _VERSION:
        raise ValueError(f"the cursor's version is {_shown(fields[0])}, not {_VERSION}")
    if len(fields) != 7:
        raise ValueError(
            f"the cursor does not have 7 fields separated by ';' but {len(fields)}{'+' * (len(fields) > 7)}"
        )
    _, stream, created, seed, epoch, choices, new_tokens = fields
    stream, has_tag, tag = stream.partition(_MODEL_MARK)
    if has_tag and not _MODEL_TAG.fullmatch(tag):
        raise ValueError(f"the cursor's model tag is {_shown(tag)}")
    request_id, has_trace, trace_id = stream.partition(_TRACE_MARK)
    if has_trace and not _TRACE_ID.fullmatch(trace_id):
        raise ValueError(f"the cursor's trace id is {_shown(trace_id)}")
    if not is_request_id(request_id):
        raise ValueError(f"the cursor's request id is {_shown(request_id)}")
    parsed_choices = _parse_choices(choices)
    return Cursor(
        request_id=request_id,
        seed=_parse_seed(seed),
        attempt_epoch=_parse_number("epoch", epoch, 1 << 63),
        choices=parsed_choices,
        new_tokens=_parse_new_tokens("" if new_tokens == _USAGE else new_tokens, parsed_choices),
        usage_sent=new_tokens == _USAGE,
        created_s=_parse_number("time of creation", created, 1 << 37),
        trace_id=trace_id,
        model_tag=tag,
    )


def _parse_choices(text: str) -> list[ChoiceCursor]:
    choices = text.split(",", MAX_CHOICES)
    if len(choices) > MAX_CHOICES:
        raise ValueError(f"the cursor has more than {MAX_CHOICES} choices")
    return [_parse_choice(choice) for choice in choices]


def _parse_choice(text: str) -> ChoiceCursor:
    position, colon, reason = text.partition(":")
    if colon and not _REASON.fullmatch(reason):
        raise ValueError(f"the cursor's finish reason is {_shown(reason)}")
    return ChoiceCursor(_parse_number("position", position, 1 << 31), reason or None)


def _parse_new_tokens(text: str, choices: list[ChoiceCursor]) -> dict[int, list[int]]:
    new_tokens: dict[int, list[int]] = {}
    if not text:
        return new_tokens
    for advance in text.split(",", MAX_CHOICES):
        index_text, colon, ids = advance.partition(":")
        index = _parse_number("choice", index_text, len(choices))
        if not colon:
            raise ValueError(f"the cursor's choice {index} has no token ids")
        if index in new_tokens:
            raise ValueError(f"the cursor names choice {index} twice among the new tokens")
        new_tokens[index] = [_parse_number("token id", token_id, 1 << 31) for token_id in ids.split("+")]
        if len(new_tokens[index]) > choices[index].position:
            raise ValueError(f"the cursor's choice {index} has more new tokens than its position says")
    return new_tokens


def _parse_number(name: str, text: str, limit: int) -> int:
    if not _NUMBER.fullmatch(text) or (number := int(text)) >= limit:
        raise ValueError(f"the cursor's {name} is {_shown(text)}, not a number below {limit}")
    return number


def _parse_seed(text: str) -> int:
    if not _INTEGER.fullmatch(text) or not -(1 << 63) <= (seed := int(text)) < 1 << 64:
        raise ValueError(f"the cursor's seed is {_shown(text)}, not a whole number of 64 bits")
    return seed


def _shown(text: str) -> str:
    """Returns a client's text for an error message: at most 40 characters, as an ASCII literal."""
    return ascii(text if len(text) <= 40 else text[:40] + "…")
