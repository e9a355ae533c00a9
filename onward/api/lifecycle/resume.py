"""Where an attempt's choices go on from, given what was made before, by whom, and what the client has of it.

An attempt goes on with a stream that is held somewhere (`continued`), or makes one again that nobody holds
(`regenerated_attempt`). Takes and returns data; asks nobody.
"""

from collections.abc import Collection, Sequence

import msgspec

from onward.api.engine_link.request_tracker import INCOMPLETE_REASONS, MAX_ATTEMPT
from onward.api.lifecycle.active_choice import ActiveChoice, ChoiceStart
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.schemas import GenerationRequest
from onward.errors import NotFound
from onward.proto.cursor import ChoiceCursor, Cursor
from onward.proto.router import Attempt, ChoiceSnapshot
from onward.web.json_body import field_error

STREAM_UNKNOWN = NotFound(
    "this stream is not held here: it was aborted, or too long ago, or by another server; send the request again",
    code="stream_unknown",
    param="Last-Event-ID",
)


def regenerated_attempt(attempt: Attempt, request: GenerationRequest, cursor: Cursor) -> Attempt:
    """The attempt whose events a client has seen up to this cursor."""
    if not request.stream:
        raise field_error("Last-Event-ID", "only allowed with stream: true")
    if len(cursor.choices) != request.num_choices:
        problem = f"names {len(cursor.choices)} choices, and the request has {request.num_choices}"
        raise field_error("Last-Event-ID", problem)
    if request.seed is not None and request.seed != cursor.seed:
        raise field_error("seed", f"the stream that is gone on with has the seed {cursor.seed}, got {request.seed}")
    if any(choice.finish_reason in INCOMPLETE_REASONS for choice in cursor.choices):
        # It was cut, and its client has been told so: it goes on as a new request with `generated_token_ids`.
        raise STREAM_UNKNOWN
    for choice, given in zip(cursor.choices, request.prior_token_ids(), strict=True):
        if choice.position < len(given):
            raise field_error("Last-Event-ID", f"names a place before the end of {request.resumed_field}")
    return msgspec.structs.replace(
        attempt,
        request_id=cursor.request_id,
        attempt_epoch=min(cursor.attempt_epoch + 1, MAX_ATTEMPT),
        seed=cursor.seed,
        created_s=cursor.created_s,
        reader_positions=cursor.choices,
        usage_sent=cursor.usage_sent,
    )


def resumed_attempt(attempt: Attempt, cursor: Cursor) -> Attempt | None:
    """The next attempt, from where the client is. None if these tokens do not reach it. It is admitted like a new request:
    the slot of the earlier attempt was given back when its client went away."""
    if len(attempt.choices) != len(cursor.choices) or attempt.seed != cursor.seed:
        return None
    pairs = list(zip(attempt.choices, cursor.choices, strict=True))
    if any(len(made.token_ids) < client.position for made, client in pairs):
        return None
    return msgspec.structs.replace(
        attempt,
        attempt_epoch=max(attempt.attempt_epoch, cursor.attempt_epoch) + 1,
        choices=[ChoiceSnapshot(made.token_ids[: client.position], client.finish_reason) for made, client in pairs],
        reader_positions=[],
        usage_sent=cursor.usage_sent,
        was_accepted=False,
    )


def prior_choices(prepared: PreparedRequest) -> list[ChoiceSnapshot]:
    """Of each choice what is known before the work begins."""
    if prepared.attempt.choices:
        return prepared.attempt.choices
    return [ChoiceSnapshot(token_ids) for token_ids in prepared.request.prior_token_ids()]


def tokens_before_end(token_ids: Sequence[int], end_token_ids: Collection[int], min_tokens: int) -> Sequence[int]:
    """The tokens that are text. An end token is no part of any grammar."""
    ends = (at for at, token in enumerate(token_ids) if at >= min_tokens and token in end_token_ids)
    return token_ids[: next(ends, len(token_ids))]


def choice_starts(prepared: PreparedRequest) -> list[ChoiceStart]:
    request = prepared.request
    owns = zip(request.prior_token_ids(), request.prior_finish_reasons(), request.rescore_positions(), strict=True)
    skips = prepared.attempt.reader_positions or [None] * request.num_choices
    has_logprobs = request.engine_logprobs is not None
    if request.needs_full_output and not prepared.returns_whole_body:
        return [_replayed_start(*pair, has_logprobs) for pair in zip(prior_choices(prepared), skips, strict=True)]
    return [
        _whole_body_start(given, len(own), told, rescore_from, has_logprobs)
        if prepared.returns_whole_body
        else _stream_start(given, len(own), told, rescore_from, skip_to)
        for given, (own, told, rescore_from), skip_to in zip(prior_choices(prepared), owns, skips, strict=True)
    ]


def _stream_start(
    given: ChoiceSnapshot, num_own: int, own_end: str | None, rescore_from: int | None, skip_to: ChoiceCursor | None
) -> ChoiceStart:
    """The client has been told `given`, of which it has brought `num_own` along itself."""
    token_ids, end = given.token_ids, given.finish_reason
    if skip_to is not None and end is None and len(token_ids) >= skip_to.position:
        # Where it was as far as this already, only the end remains to be skipped.
        end, skip_to = skip_to.finish_reason, None
    if end is not None:
        return ChoiceStart(token_ids, end, emit_end=False)
    is_at_own = len(token_ids) == num_own
    if is_at_own and own_end is not None:
        return ChoiceStart(token_ids, own_end, rescore_from=rescore_from)
    return ChoiceStart(token_ids, rescore_from=rescore_from if is_at_own else None, reader_position=skip_to)


def _whole_body_start(
    given: ChoiceSnapshot, num_own: int, own_end: str | None, rescore_from: int | None, has_logprobs: bool
) -> ChoiceStart:
    """Nobody has been told anything; the answer has all behind what the client has brought along."""
    token_ids = given.token_ids
    if own_end is not None:
        return ChoiceStart(token_ids[:num_own], own_end, rescore_from=rescore_from)
    scored_from = num_own if rescore_from is None else rescore_from
    is_scored = has_logprobs and scored_from < len(token_ids)
    end = None if given.finish_reason in INCOMPLETE_REASONS else given.finish_reason
    return ChoiceStart(token_ids, end, emit_from=num_own, rescore_from=scored_from if is_scored else None)


def _replayed_start(given: ChoiceSnapshot, skip_to: ChoiceCursor | None, has_logprobs: bool) -> ChoiceStart:
    """The client has been told `given`, and what it is told next depends on all of it."""
    token_ids, end = given.token_ids, given.finish_reason
    if skip_to is not None and end is None and len(token_ids) >= skip_to.position:
        end, skip_to = skip_to.finish_reason, None
    is_scored = has_logprobs and bool(token_ids) and end is None
    return ChoiceStart(
        token_ids, end, end is None, emit_from=0, rescore_from=0 if is_scored else None, reader_position=skip_to
    )


def reader_position(prepared: PreparedRequest, start: ChoiceStart, choice: ActiveChoice) -> ChoiceCursor:
    is_told = prepared.returns_whole_body or not start.emit_end
    return ChoiceCursor(choice.position, choice.finish_reason if is_told else None)


def choice_snapshot(choice: ActiveChoice, given: ChoiceSnapshot) -> ChoiceSnapshot:
    """What there is of a choice now; one that is being scored again may be behind what was given."""
    if choice.position < len(given.token_ids):
        return given
    reason = choice.finish_reason
    return ChoiceSnapshot(list(choice.token_ids), None if reason in INCOMPLETE_REASONS else reason)
