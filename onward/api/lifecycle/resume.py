"""Computes where an attempt's choices continue, from the tokens of earlier attempts and the client's position.

An attempt continues a stream whose tokens some process has (`resumed_attempt`), or generates a stream again whose tokens
are stored nowhere (`regenerated_attempt`). Takes and returns data, without I/O.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import msgspec

from onward.api.engine_link.request_tracker import MAX_ATTEMPT
from onward.api.lifecycle.choice_output import ChoiceOutput, ChoiceStart
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.schemas import GenerationRequest
from onward.errors import NotFound
from onward.proto.cursor import ChoiceCursor, Cursor
from onward.proto.finish_reasons import INCOMPLETE_REASONS
from onward.proto.router import Attempt, ChoiceSnapshot, StreamRecord
from onward.proto.step import TokenLogprobs
from onward.web.json_body import field_error

STREAM_UNKNOWN = NotFound(
    "this stream is not held here: it was aborted, or too long ago, or by another server; send the request again",
    code="stream_unknown",
    param="Last-Event-ID",
)


def regenerated_attempt(attempt: Attempt, request: GenerationRequest, cursor: Cursor) -> Attempt:
    """Returns the attempt that generates a stream again of which the client has the events up to this cursor."""
    if not request.stream:
        raise field_error("Last-Event-ID", "only allowed with stream: true")
    if len(cursor.choices) != request.num_choices:
        problem = f"names {len(cursor.choices)} choices, and the request has {request.num_choices}"
        raise field_error("Last-Event-ID", problem)
    if request.seed is not None and request.seed != cursor.seed:
        raise field_error("seed", f"the stream that is gone on with has the seed {cursor.seed}, got {request.seed}")
    if any(choice.finish_reason in INCOMPLETE_REASONS for choice in cursor.choices):
        # The stream was cut, and its client has seen that. It is continued by a new request with `generated_token_ids`.
        raise STREAM_UNKNOWN
    for choice, prior in zip(cursor.choices, request.prior_token_ids(), strict=True):
        if choice.position < len(prior):
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
    """Returns the next attempt, from the client's position. None if the earlier attempt's tokens do not reach it. The
    attempt is admitted like a new request: the slot of the earlier one was released when its client disconnected."""
    if len(attempt.choices) != len(cursor.choices) or attempt.seed != cursor.seed:
        return None
    pairs = list(zip(attempt.choices, cursor.choices, strict=True))
    if any(len(snapshot.token_ids) < reader.position for snapshot, reader in pairs):
        return None
    return msgspec.structs.replace(
        attempt,
        attempt_epoch=max(attempt.attempt_epoch, cursor.attempt_epoch) + 1,
        choices=[
            ChoiceSnapshot(snapshot.token_ids[: reader.position], reader.finish_reason) for snapshot, reader in pairs
        ],
        reader_positions=[],
        usage_sent=cursor.usage_sent,
        was_accepted=False,
    )


def with_prior_logprobs(prepared: PreparedRequest, record: StreamRecord | None) -> PreparedRequest:
    """Adds the logprobs that a record of a stored response has of the given tokens. The client has received them, so they
    must not be lost if this attempt ends before the engine has computed anything."""
    return replace(prepared, prior_logprobs=tuple(_shared_logprobs(prepared.attempt, record)))


def with_longest_logprobs(record: StreamRecord, other: StreamRecord | None) -> StreamRecord:
    """Returns the record with the longer of the two records' logprobs of its tokens. A router's record has none."""
    shared = _shared_logprobs(record.attempt, other)
    return msgspec.structs.replace(record, logprobs=shared) if len(shared) > len(record.logprobs) else record


def _shared_logprobs(attempt: Attempt, record: StreamRecord | None) -> list[TokenLogprobs]:
    """Returns the logprobs of an attempt's tokens from a record of a stored response, which has one choice."""
    if record is None or not (record.logprobs and record.attempt.choices and attempt.choices):
        return []
    recorded, given = record.attempt.choices[0].token_ids, attempt.choices[0].token_ids
    num_shared = min(len(recorded), len(given))
    # The tokens differ if a model that is not exact was run again from an earlier position at another instance.
    return record.logprobs[:num_shared] if recorded[:num_shared] == given[:num_shared] else []


def needs_prior_logprobs(prepared: PreparedRequest) -> bool:
    """Returns whether a record of an earlier attempt may have logprobs of the tokens that this attempt starts with."""
    request = prepared.request
    return request.is_stored and request.num_logprobs is not None and bool(prepared.attempt.choices)


def prior_choices(prepared: PreparedRequest) -> list[ChoiceSnapshot]:
    """Returns the tokens and finish reason of each choice before the request is submitted."""
    if prepared.attempt.choices:
        return prepared.attempt.choices
    return [ChoiceSnapshot(token_ids) for token_ids in prepared.request.prior_token_ids()]


def tokens_before_end(token_ids: Sequence[int], end_token_ids: Collection[int], min_tokens: int) -> Sequence[int]:
    """Returns the tokens before the first end token at or after `min_tokens`. An end token is not part of a grammar."""
    ends = (index for index, token_id in enumerate(token_ids) if index >= min_tokens and token_id in end_token_ids)
    return token_ids[: next(ends, len(token_ids))]


def choice_starts(prepared: PreparedRequest) -> list[ChoiceStart]:
    request = prepared.request
    client_states = zip(
        request.prior_token_ids(), request.prior_finish_reasons(), request.rescore_positions(), strict=True
    )
    reader_positions = prepared.attempt.reader_positions or [None] * request.num_choices
    has_logprobs = request.engine_logprobs is not None
    if request.needs_full_output and not prepared.returns_whole_body:
        return [
            _replayed_start(*pair, has_logprobs, prepared.prior_logprobs)
            for pair in zip(prior_choices(prepared), reader_positions, strict=True)
        ]
    return [
        _whole_body_start(
            prior,
            len(client_token_ids),
            client_end,
            rescore_from,
            has_logprobs,
            prepared.prior_logprobs,
            includes_given=request.needs_full_output,
        )
        if prepared.returns_whole_body
        else _stream_start(prior, len(client_token_ids), client_end, rescore_from, skip_to)
        for prior, (client_token_ids, client_end, rescore_from), skip_to in zip(
            prior_choices(prepared), client_states, reader_positions, strict=True
        )
    ]


def _stream_start(
    prior: ChoiceSnapshot,
    num_client_tokens: int,
    client_end: str | None,
    rescore_from: int | None,
    skip_to: ChoiceCursor | None,
) -> ChoiceStart:
    """Returns the start of a choice in a stream. The client has the tokens of `prior`, and sent the first
    `num_client_tokens` of them itself."""
    token_ids, end = prior.token_ids, prior.finish_reason
    if skip_to is not None and end is None and len(token_ids) >= skip_to.position:
        # `prior` reaches the client's position, so only the end remains to be skipped.
        end, skip_to = skip_to.finish_reason, None
    if end is not None:
        return ChoiceStart(token_ids, end, emit_end=False)
    is_at_client_end = len(token_ids) == num_client_tokens
    if is_at_client_end and client_end is not None:
        return ChoiceStart(token_ids, client_end, rescore_from=rescore_from)
    return ChoiceStart(token_ids, rescore_from=rescore_from if is_at_client_end else None, reader_position=skip_to)


def _whole_body_start(
    prior: ChoiceSnapshot,
    num_client_tokens: int,
    client_end: str | None,
    rescore_from: int | None,
    has_logprobs: bool,
    logprobs: Sequence[TokenLogprobs],
    *,
    includes_given: bool,
) -> ChoiceStart:
    """Returns the start of a choice of which nothing was sent to the client. The body has all tokens after those that the
    client sent, and with `includes_given` those too."""
    token_ids = prior.token_ids
    if client_end is not None:
        return ChoiceStart(token_ids[:num_client_tokens], client_end, rescore_from=rescore_from)
    scored_from = len(logprobs) or (num_client_tokens if rescore_from is None else rescore_from)
    needs_rescore = has_logprobs and scored_from < len(token_ids)
    end = None if prior.finish_reason in INCOMPLETE_REASONS else prior.finish_reason
    return ChoiceStart(
        token_ids,
        end,
        emit_from=0 if includes_given else num_client_tokens,
        rescore_from=scored_from if needs_rescore else None,
        logprobs=logprobs,
    )


def _replayed_start(
    prior: ChoiceSnapshot, skip_to: ChoiceCursor | None, has_logprobs: bool, logprobs: Sequence[TokenLogprobs]
) -> ChoiceStart:
    """Returns the start of a choice whose tokens are all replayed. The client has the tokens of `prior`, and the next
    events depend on all of them."""
    token_ids, end = prior.token_ids, prior.finish_reason
    if skip_to is not None and end is None and len(token_ids) >= skip_to.position:
        end, skip_to = skip_to.finish_reason, None
    needs_rescore = has_logprobs and len(logprobs) < len(token_ids) and end is None
    return ChoiceStart(
        token_ids,
        end,
        end is None,
        emit_from=0,
        rescore_from=len(logprobs) if needs_rescore else None,
        reader_position=skip_to,
        logprobs=logprobs,
    )


def reader_position(prepared: PreparedRequest, start: ChoiceStart, choice: ChoiceOutput) -> ChoiceCursor:
    is_end_sent = prepared.returns_whole_body or not start.emit_end
    return ChoiceCursor(choice.position, choice.finish_reason if is_end_sent else None)


def choice_snapshot(choice: ChoiceOutput, prior: ChoiceSnapshot) -> ChoiceSnapshot:
    """Returns the tokens and finish reason of a choice now. Returns `prior` for a choice that is being rescored and is
    still behind its given tokens."""
    if choice.position < len(prior.token_ids):
        return prior
    reason = choice.finish_reason
    return ChoiceSnapshot(list(choice.token_ids), None if reason in INCOMPLETE_REASONS else reason)
