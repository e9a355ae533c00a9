"""The fields of a client's request that the router reads or fixes before the first attempt.

The router checks only the model. The instance checks all others, and refuses what the
router cannot read. A number that is out of bounds counts as absent here.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from onward.errors import InvalidRequest
from onward.proto.cursor import Cursor
from onward.proto.engine import CallerLimits
from onward.proto.router import Attempt
from onward.router.client_stream import ClientRequest, ClientStream, DeliveredChoice
from onward.web.body_parts import check_parts
from onward.web.json_body import decode

MAX_SESSION_LENGTH = 256
_PATHS_WITH_USAGE_CHUNK = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/generate"})
"""Where `stream_options.include_usage` adds a last chunk. Elsewhere instances never send one, so a stream must not wait
for it."""
_SEEDS = range(-(1 << 63), 1 << 63)
_DEADLINES_MS = range(1, 1 << 53)


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _RoutedFields(msgspec.Struct, frozen=True):
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    deadline_ms: int | None = None
    cache_salt: str | None = None
    generated_token_ids: list[int | list[int]] | None = None
    completion_token_ids: list[int | list[int]] | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    user: Any = None
    prompt_cache_key: Any = None


class _NamedModel(msgspec.Struct, frozen=True):
    model: str | None = None


_models = msgspec.json.Decoder(_NamedModel)
_decoder = msgspec.json.Decoder(_RoutedFields)
_token_ids = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]])


@dataclass(frozen=True, slots=True)
class RequestMetadata:
    """Data of a request that is not in its body: what the client sent beside it, and what the router generated."""

    request_id: str
    random_seed: int
    arrived_wall_s: float
    arrived_at_s: float
    client_request_id: str = ""
    session: str = ""
    caller: str = ""
    """The name of its key."""
    caller_limits: CallerLimits | None = None
    caller_priority: int | None = None
    timeout_s: float | None = None
    """For requests that bring no deadline."""
    default_max_tokens: int = 0
    strict_fields: bool = False


def check_body(body: bytes) -> None:
    """Refuses a body that every instance would refuse, with the same message, so that the client need not wait for an
    instance."""
    check_parts(body)
    decode(body, _models)


def build_client_request(
    path: str, body: bytes, metadata: RequestMetadata, cursor: Cursor | None = None
) -> ClientRequest:
    """Builds the client request from a POST body; a body that cannot be decoded counts as one without fields. `cursor`
    is the client's position if it has lost its stream and sends the request again. The request then keeps the id, seed
    and creation time of the cursor. Raises `InvalidRequest` if the body has another seed than the cursor."""
    fields = _decode_fields(body)
    return ClientRequest(
        request_id=metadata.request_id if cursor is None else cursor.request_id,
        seed=_seed(fields, metadata, cursor),
        created_s=int(metadata.arrived_wall_s) if cursor is None else cursor.created_s,
        arrived_at_s=metadata.arrived_at_s,
        path=path,
        body=body,
        is_streaming=bool(fields.stream),
        wants_usage=path in _PATHS_WITH_USAGE_CHUNK and _includes_usage(fields),
        client_request_id=metadata.client_request_id,
        caller=metadata.caller,
        caller_limits=metadata.caller_limits,
        caller_priority=metadata.caller_priority,
        deadline_at_s=_deadline(fields, metadata.arrived_at_s, metadata.timeout_s),
        has_client_deadline=_deadline(fields, metadata.arrived_at_s, None) is not None,
        generated_token_ids=_generated_token_ids(fields),
        skip_to=() if cursor is None else tuple(cursor.choices),
        usage_sent=cursor is not None and cursor.usage_sent,
        routing_token_ids=_prompt_token_ids(fields),
        cache_salt=fields.cache_salt or "",
        max_output=fields.max_completion_tokens or fields.max_output_tokens or fields.max_tokens,
        default_max_tokens=metadata.default_max_tokens,
        strict_fields=metadata.strict_fields,
        session_key=_session(fields, metadata),
        model=model_of_body(body),
        model_tag="" if cursor is None else cursor.model_tag,
    )


def model_of_body(body: bytes) -> str:
    """Returns the model that a body names; empty if it names none or cannot be decoded."""
    try:
        return _models.decode(body).model or ""
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def _decode_fields(body: bytes) -> _RoutedFields:
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _RoutedFields()


def _includes_usage(fields: _RoutedFields) -> bool:
    return fields.stream_options is not None and bool(fields.stream_options.include_usage)


def _seed(fields: _RoutedFields, metadata: RequestMetadata, cursor: Cursor | None) -> int:
    if cursor is not None:
        if fields.seed not in (None, cursor.seed):
            raise InvalidRequest(f"seed: the stream that is gone on with has the seed {cursor.seed}", param="seed")
        return cursor.seed
    return metadata.random_seed if fields.seed is None or fields.seed not in _SEEDS else fields.seed


def deadline_from_body(body: bytes, now_s: float, timeout_s: float | None) -> float | None:
    """Returns the deadline of a request that has arrived now. `timeout_s` applies to requests without one."""
    return _deadline(_decode_fields(body), now_s, timeout_s)


def _deadline(fields: _RoutedFields, now_s: float, timeout_s: float | None) -> float | None:
    if fields.deadline_ms is not None and fields.deadline_ms in _DEADLINES_MS:
        return now_s + fields.deadline_ms / 1000
    return None if timeout_s is None else now_s + timeout_s


def _generated_token_ids(fields: _RoutedFields) -> tuple[list[int], ...]:
    """Returns the generated tokens that the request continues, as one list of ids for each choice. A flat list in the
    body belongs to the only choice. Returns an empty tuple if the body has no such tokens."""
    # An instance refuses a request whose two names for these tokens disagree.
    tokens = fields.generated_token_ids or fields.completion_token_ids or []
    per_choice = tuple(item for item in tokens if isinstance(item, list))
    if per_choice or not tokens:
        return per_choice
    return ([item for item in tokens if isinstance(item, int)],)


def _prompt_token_ids(fields: _RoutedFields) -> list[int] | None:
    for raw in (fields.prompt_token_ids, fields.prompt):
        if bytes(memoryview(raw)[:1]) == b"[":
            try:
                return _token_ids.decode(raw)
            except msgspec.MsgspecError:
                return None
    return None


def _session(fields: _RoutedFields, metadata: RequestMetadata) -> str:
    for key in (metadata.session, fields.prompt_cache_key, fields.user):
        if isinstance(key, str) and key:
            return key[:MAX_SESSION_LENGTH]
    return ""


def stream_from_record(attempt: Attempt, now_s: float) -> ClientStream:
    """Rebuilds a stream from the attempt of a record that an instance stores. The waiting time and the deadline are
    converted to this router's clock."""
    metadata = RequestMetadata(attempt.request_id, attempt.seed, attempt.created_s, now_s, attempt.client_request_id)
    client_request = build_client_request(attempt.path, attempt.body, metadata)
    client_request = replace(
        client_request,
        seed=attempt.seed,
        created_s=attempt.created_s,
        arrived_at_s=now_s - attempt.waited_s,
        deadline_at_s=None if attempt.deadline_in_s is None else now_s + attempt.deadline_in_s,
        prompt_token_ids=attempt.prompt_token_ids,
        routing_token_ids=attempt.prompt_token_ids or client_request.routing_token_ids,
        caller=attempt.caller,
        caller_limits=attempt.caller_limits,
        caller_priority=attempt.caller_priority,
        default_max_tokens=attempt.default_max_tokens,
        trace=attempt.trace,
        model_tag=attempt.model_tag,
    )
    choices = [DeliveredChoice(list(choice.token_ids), choice.finish_reason) for choice in attempt.choices]
    stream = ClientStream(client_request, 0, epoch=attempt.attempt_epoch, choices=choices)
    stream.num_cached_tokens, stream.completed_s = attempt.num_cached_tokens, attempt.completed_s
    stream.max_prompt_tokens = attempt.max_prompt_tokens
    return stream
