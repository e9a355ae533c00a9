"""Where an attempt's choices go on from, given what was made before, by whom, and what the client has of it.

An attempt goes on with a stream that is held somewhere (`continued`), or makes one again that nobody holds
(`made_again`). Takes and returns data; asks nobody.
"""

from collections.abc import Collection, Sequence

import msgspec

from onward.api.choice import Choice, Start
from onward.api.ledger import CUT, MAX_ATTEMPT
from onward.api.prepared import Prepared
from onward.api.requests import GenerationRequest
from onward.errors import NotFound
from onward.proto.cursor import ChoiceCursor, Cursor
from onward.proto.router import Attempt, GivenChoice
from onward.web.body import wrong

STREAM_UNKNOWN = NotFound(
    "this stream is not held here: it was aborted, or too long ago, or by another server; send the request again",
    code="stream_unknown",
    param="Last-Event-ID",
)


def made_again(attempt: Attempt, request: GenerationRequest, cursor: Cursor) -> Attempt:
    """The attempt whose events a client has seen up to this cursor."""
    if not request.stream:
        raise wrong("Last-Event-ID", "only allowed with stream: true")
    if len(cursor.choices) != request.num_choices:
        problem = f"names {len(cursor.choices)} choices, and the request has {request.num_choices}"
        raise wrong("Last-Event-ID", problem)
    if request.seed is not None and request.seed != cursor.seed:
        raise wrong("seed", f"the stream that is gone on with has the seed {cursor.seed}, got {request.seed}")
    if any(choice.finish_reason in CUT for choice in cursor.choices):
        # It was cut, and its client has been told so: it goes on as a new request with `generated_token_ids`.
        raise STREAM_UNKNOWN
    for choice, given in zip(cursor.choices, request.generated(), strict=True):
        if choice.position < len(given):
            raise wrong("Last-Event-ID", f"names a place before the end of {request.resumed_field}")
    return msgspec.structs.replace(
        attempt,
        request_id=cursor.request_id,
        epoch=min(cursor.epoch + 1, MAX_ATTEMPT),
        seed=cursor.seed,
        created_s=cursor.created_s,
        skip_to=cursor.choices,
        usage_told=cursor.usage_told,
    )


def continued(attempt: Attempt, cursor: Cursor) -> Attempt | None:
    """The next attempt, from where the client is. None if these tokens do not reach it. It is admitted like a new request:
    the slot of the earlier attempt was given back when its client went away."""
    if len(attempt.choices) != len(cursor.choices) or attempt.seed != cursor.seed:
        return None
    pairs = list(zip(attempt.choices, cursor.choices, strict=True))
    if any(len(made.token_ids) < client.position for made, client in pairs):
        return None
    return msgspec.structs.replace(
        attempt,
        epoch=max(attempt.epoch, cursor.epoch) + 1,
        choices=[GivenChoice(made.token_ids[: client.position], client.finish_reason) for made, client in pairs],
        skip_to=[],
        usage_told=cursor.usage_told,
        was_taken=False,
    )


def given_of(prepared: Prepared) -> list[GivenChoice]:
    """Of each choice what is known before the work begins."""
    if prepared.attempt.choices:
        return prepared.attempt.choices
    return [GivenChoice(token_ids) for token_ids in prepared.request.generated()]


def text_before_end(token_ids: Sequence[int], end_token_ids: Collection[int], min_tokens: int) -> Sequence[int]:
    """The tokens that are text. An end token is no part of any grammar."""
    ends = (at for at, token in enumerate(token_ids) if at >= min_tokens and token in end_token_ids)
    return token_ids[: next(ends, len(token_ids))]


def starts_of(prepared: Prepared) -> list[Start]:
    request = prepared.request
    owns = zip(request.generated(), request.told_reasons(), request.rescored_from(), strict=True)
    skips = prepared.attempt.skip_to or [None] * request.num_choices
    has_logprobs = request.made_logprobs is not None
    if request.tells_all and not prepared.is_whole:
        return [_start_retold(*pair, has_logprobs) for pair in zip(given_of(prepared), skips, strict=True)]
    return [
        _start_whole(given, len(own), told, rescore_from, has_logprobs)
        if prepared.is_whole
        else _start_stream(given, len(own), told, rescore_from, skip_to)
        for given, (own, told, rescore_from), skip_to in zip(given_of(prepared), owns, skips, strict=True)
    ]


def _start_stream(
    given: GivenChoice, num_own: int, own_end: str | None, rescore_from: int | None, skip_to: ChoiceCursor | None
) -> Start:
    """The client has been told `given`, of which it has brought `num_own` along itself."""
    token_ids, end = given.token_ids, given.finish_reason
    if skip_to is not None and end is None and len(token_ids) >= skip_to.position:
        # Where it was as far as this already, only the end remains to be skipped.
        end, skip_to = skip_to.finish_reason, None
    if end is not None:
        return Start(token_ids, end, repeats_end=False)
    is_at_own = len(token_ids) == num_own
    if is_at_own and own_end is not None:
        return Start(token_ids, own_end, rescore_from=rescore_from)
    return Start(token_ids, rescore_from=rescore_from if is_at_own else None, skip_to=skip_to)


def _start_whole(
    given: GivenChoice, num_own: int, own_end: str | None, rescore_from: int | None, has_logprobs: bool
) -> Start:
    """Nobody has been told anything; the answer has all behind what the client has brought along."""
    token_ids = given.token_ids
    if own_end is not None:
        return Start(token_ids[:num_own], own_end, rescore_from=rescore_from)
    scored_from = num_own if rescore_from is None else rescore_from
    is_scored = has_logprobs and scored_from < len(token_ids)
    end = None if given.finish_reason in CUT else given.finish_reason
    return Start(token_ids, end, tells_from=num_own, rescore_from=scored_from if is_scored else None)


def _start_retold(given: GivenChoice, skip_to: ChoiceCursor | None, has_logprobs: bool) -> Start:
    """The client has been told `given`, and what it is told next depends on all of it."""
    token_ids, end = given.token_ids, given.finish_reason
    if skip_to is not None and end is None and len(token_ids) >= skip_to.position:
        end, skip_to = skip_to.finish_reason, None
    is_scored = has_logprobs and bool(token_ids) and end is None
    return Start(token_ids, end, end is None, tells_from=0, rescore_from=0 if is_scored else None, skip_to=skip_to)


def known_of(prepared: Prepared, start: Start, choice: Choice) -> ChoiceCursor:
    is_told = prepared.is_whole or not start.repeats_end
    return ChoiceCursor(choice.position, choice.finish_reason if is_told else None)


def made_of(choice: Choice, given: GivenChoice) -> GivenChoice:
    """What there is of a choice now; one that is being scored again may be behind what was given."""
    if choice.position < len(given.token_ids):
        return given
    reason = choice.finish_reason
    return GivenChoice(list(choice.token_ids), None if reason in CUT else reason)
