"""From a request to work for the engine: everything about it is fixed and checked here, before the engine hears of it.

Whoever asks, a request is an `Attempt`: of a plain client's we fix id, seed and times ourselves, a router has done so
before. That is all that is needed to go on with it later, here or elsewhere. Knows nothing of HTTP.
"""

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import msgspec

from onward.api import continuing
from onward.api.answer import Answer, Choice, Piece, Start
from onward.api.dialect import Dialect, Head
from onward.api.engine_client import EngineClient, Mailbox
from onward.api.identity import Identity
from onward.api.ledger import MAX_ATTEMPT, RESCHEDULE, Order
from onward.api.limits import output_limit
from onward.api.openai import Bounds, GenerationRequest, check_token_ids
from onward.api.prompts import Prompts
from onward.chance import Chance
from onward.clock import Clock
from onward.config import ApiConfig
from onward.errors import NotFound
from onward.obs.metrics import Counter
from onward.proto import SCHEMA_VERSION
from onward.proto.cursor import ChoiceCursor, Cursor
from onward.proto.model import PreparedModel
from onward.proto.router import Attempt, GivenChoice
from onward.proto.sampling import Sampling
from onward.proto.step import WorkerHello
from onward.web.body import wrong

SEED_BITS = 53
"""Of a seed that we choose: a client that reads it from JSON as a double sends back the same one."""
EXACT_QUANTIZATION = "int8"
STREAM_UNKNOWN = NotFound(
    "this stream is not held here: it was aborted, or too long ago, or by another server; send the request again",
    code="stream_unknown",
    param="Last-Event-ID",
)


def is_exact(model: PreparedModel) -> bool:
    """Whether the same seed makes the same tokens, whatever else the batch computes."""
    return model.quantization == EXACT_QUANTIZATION or model.is_deterministic


@dataclass(frozen=True, slots=True)
class Backend:
    """What every request needs."""

    config: ApiConfig
    model: PreparedModel
    prompts: Prompts
    client: EngineClient
    clock: Clock
    threads: Executor
    """For templates and tokenizing, which may take long and must not hold up anybody's tokens."""
    unknown_fields: Counter
    chance: Chance


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has passed every check but those that need the engine."""

    attempt: Attempt
    request: GenerationRequest
    num_unknown_fields: int
    prompt_token_ids: list[int]
    bad_words: tuple[tuple[int, ...], ...]
    deadline_at_s: float | None
    is_routed: bool
    """A router asks, and reads the tokens."""

    @property
    def is_continued(self) -> bool:
        """The answer has begun in an earlier attempt."""
        return bool(self.attempt.choices or self.attempt.skip_to)

    @property
    def is_whole(self) -> bool:
        """All of the answer is told at its end, also what an earlier attempt has made."""
        return self.is_routed and not self.request.stream


@dataclass(frozen=True, slots=True)
class Job:
    """A request on its way."""

    head: Head
    prepared: Prepared
    answer: Answer
    positions: list[int]
    """Where each choice goes on from."""
    known: list[ChoiceCursor]
    """Of each choice, what whoever follows the tokens has of it."""
    replayed: list[Piece]
    """What there is to tell about given tokens: the ends of choices; for a whole answer all of it."""
    mailbox: Mailbox | None
    """None if there is nothing left to generate."""

    @property
    def closing(self) -> list[Piece]:
        """The ends of choices whose given tokens had ended already."""
        return [] if self.prepared.is_whole else self.replayed

    def to_continue(self) -> dict[str, object]:
        """What stands beside the last choice, if this answer is to be continued elsewhere."""
        return continuing.of_answer(self.prepared.request, self.prepared.attempt.seed, self.answer)

    def attempt_from_here(self, now_s: float) -> Attempt:
        """The same request with all tokens that were made."""
        prepared, usage = self.prepared, self.answer.usage()
        cached_is_known = any(choice.num_cached_tokens is not None for choice in self.answer.choices)
        return msgspec.structs.replace(
            prepared.attempt,
            choices=[_made(choice, known) for choice, known in zip(self.answer.choices, _given(prepared), strict=True)],
            num_cached_tokens=usage.cached_tokens if cached_is_known else None,
            deadline_s=None if prepared.deadline_at_s is None else max(0.0, prepared.deadline_at_s - now_s),
            prefill_peers=[],
            final=False,
        )


@dataclass(frozen=True, slots=True)
class Begun:
    """A choice at the place it goes on from."""

    choice: Choice
    start: Start
    piece: Piece | None
    known: ChoiceCursor


class Jobs:
    """Makes those of one endpoint."""

    def __init__(self, dialect: Dialect, path: str, backend: Backend) -> None:
        self.dialect = dialect
        self.path = path
        self._backend = backend
        self._bounds = Bounds(backend.model.name, backend.model.config.vocab_size, backend.config.max_choices)

    def of_client(self, identity: Identity, body: bytes, cursor: Cursor | None = None) -> Prepared:
        """Runs in a thread. With a cursor, the client has the answer up to there, and nobody else has it."""
        request, num_unknown = self.dialect.decode(body, self._bounds)
        seed = self._backend.chance.bits(SEED_BITS) if request.seed is None else request.seed
        attempt = Attempt(
            schema_version=SCHEMA_VERSION,
            path=self.path,
            body=body,
            request_id=identity.request_id,
            epoch=1,
            seed=seed,
            created_s=identity.created_s,
            arrival_s=identity.arrival_s,
            label=identity.label,
            deadline_s=self._deadline(request),
        )
        if cursor is not None:
            attempt = _made_again(attempt, request, cursor)
        return self._prepared(attempt, request, num_unknown, identity.started_at_s, is_routed=False)

    def of_attempt(self, attempt: Attempt, started_at_s: float, *, is_routed: bool) -> Prepared:
        """Runs in a thread."""
        request, num_unknown = self.dialect.decode(attempt.body, self._bounds)
        self._check(attempt, request)
        return self._prepared(attempt, request, num_unknown, started_at_s, is_routed=is_routed)

    def start(self, prepared: Prepared, limits: WorkerHello) -> Job:
        """Asks the engine for whatever is not there yet."""
        max_tokens = output_limit(
            len(prepared.prompt_token_ids),
            prepared.request.output_limit,
            prepared.request.min_tokens or 0,
            limits,
            self.dialect.prompt_param,
        )
        begun = [self._begin(prepared, index, max_tokens, start) for index, start in enumerate(_starts(prepared))]
        orders = [_order(prepared, one) for one in begun if one.choice.finish_reason is None]
        return Job(
            head=self._head(prepared.attempt),
            prepared=prepared,
            answer=Answer(prepared.prompt_token_ids, [one.choice for one in begun]),
            positions=[one.choice.position for one in begun],
            known=[one.known for one in begun],
            replayed=[one.piece for one in begun if one.piece is not None],
            mailbox=self._open(prepared, orders) if orders else None,
        )

    def _open(self, prepared: Prepared, orders: list[Order]) -> Mailbox:
        is_new = not (prepared.is_routed or prepared.is_continued)
        return self._backend.client.open(orders, is_new=is_new, with_nudges=prepared.is_routed)

    def _prepared(
        self, attempt: Attempt, request: GenerationRequest, num_unknown: int, started_at_s: float, *, is_routed: bool
    ) -> Prepared:
        prompt = attempt.prompt_token_ids
        return Prepared(
            attempt=attempt,
            request=request,
            num_unknown_fields=num_unknown,
            prompt_token_ids=self.dialect.prompt_token_ids(request, attempt.created_s) if prompt is None else prompt,
            bad_words=self._backend.prompts.bad_words(request.bad_words or []),
            deadline_at_s=None if attempt.deadline_s is None else started_at_s + attempt.deadline_s,
            is_routed=is_routed,
        )

    def _deadline(self, request: GenerationRequest) -> float | None:
        if request.deadline_ms is not None:
            return request.deadline_ms / 1000
        return self._backend.config.default_deadline_s

    def _check(self, attempt: Attempt, request: GenerationRequest) -> None:
        if not 1 <= attempt.epoch <= MAX_ATTEMPT:
            raise wrong("epoch", f"must be between 1 and {MAX_ATTEMPT}, got {attempt.epoch}")
        for name, given in (("choices", attempt.choices), ("skip_to", attempt.skip_to)):
            if given and len(given) != request.num_choices:
                raise wrong(name, f"must be one per choice ({request.num_choices}), got {len(given)}")
        if attempt.skip_to and not is_exact(self._backend.model):
            raise STREAM_UNKNOWN
        for index, choice in enumerate(attempt.choices):
            check_token_ids(f"choices[{index}].token_ids", choice.token_ids, self._bounds)
        if attempt.prompt_token_ids is not None:
            check_token_ids("prompt_token_ids", attempt.prompt_token_ids, self._bounds)
            if not attempt.prompt_token_ids:
                raise wrong("prompt_token_ids", "must not be empty")

    def _begin(self, prepared: Prepared, index: int, max_tokens: int, start: Start) -> Begun:
        choice = self._choice(prepared, index, max_tokens)
        piece = choice.replay(start)
        begun = Begun(choice, start, piece, _known(prepared, start, choice))
        wants_scores = start.rescore_from is not None or (prepared.is_whole and choice.owes_prompt)
        if choice.finish_reason is None or not wants_scores:
            return begun
        if start.tells_from is None or choice.position <= start.tells_from:
            problem = f"choice {index} has ended with the given tokens, so nothing is computed that could score them"
            raise wrong("rescore_from", f"{problem} again")
        # Only what runs is scored, so the last token is made again. Whoever follows the tokens need not know.
        start = Start(choice.token_ids[:-1], tells_from=start.tells_from, rescore_from=start.rescore_from)
        choice = self._choice(prepared, index, choice.position)
        return Begun(choice, start, choice.replay(start), begun.known)

    def _choice(self, prepared: Prepared, index: int, max_tokens: int) -> Choice:
        sampling = _sampling(prepared, index, max_tokens, self._backend.model.eos_token_ids)
        text = self.dialect.new_text(prepared.request.stop_strings(), sampling)
        offsets = None if sampling.logprobs is None else self._backend.prompts.new_offsets()
        cached = prepared.attempt.num_cached_tokens
        request_id = f"{prepared.attempt.request_id}-{index}"
        return Choice(index, request_id, sampling, text, offsets, num_cached_tokens=cached)

    def _head(self, attempt: Attempt) -> Head:
        model = self._backend.model
        return Head(self.dialect.id_prefix + attempt.request_id, attempt.created_s, model.name, model.fingerprint)


def _made_again(attempt: Attempt, request: GenerationRequest, cursor: Cursor) -> Attempt:
    """The attempt whose events a client has seen up to this cursor."""
    if not request.stream:
        raise wrong("Last-Event-ID", "only allowed with stream: true")
    if len(cursor.choices) != request.num_choices:
        problem = f"names {len(cursor.choices)} choices, and the request has {request.num_choices}"
        raise wrong("Last-Event-ID", problem)
    if request.seed is not None and request.seed != cursor.seed:
        raise wrong("seed", f"the stream that is gone on with has the seed {cursor.seed}, got {request.seed}")
    if any(choice.finish_reason == RESCHEDULE for choice in cursor.choices):
        # It was given up, and its client has been told so: it goes on as a new request with `generated_token_ids`.
        raise STREAM_UNKNOWN
    for choice, given in zip(cursor.choices, request.generated(), strict=True):
        if choice.position < len(given):
            raise wrong("Last-Event-ID", "names a place before the end of generated_token_ids")
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
    """The next attempt, from where the client is. None if these tokens do not reach it."""
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
    )


def _given(prepared: Prepared) -> list[GivenChoice]:
    """Of each choice what is known before the work begins."""
    if prepared.attempt.choices:
        return prepared.attempt.choices
    return [GivenChoice(token_ids) for token_ids in prepared.request.generated()]


def _starts(prepared: Prepared) -> list[Start]:
    request = prepared.request
    owns = zip(request.generated(), request.told_reasons(), request.rescored_from(), strict=True)
    skips = prepared.attempt.skip_to or [None] * request.num_choices
    return [
        _start_whole(given, len(own), told, rescore_from, request.num_logprobs is not None)
        if prepared.is_whole
        else _start_stream(given, len(own), told, rescore_from, skip_to)
        for given, (own, told, rescore_from), skip_to in zip(_given(prepared), owns, skips, strict=True)
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
    end = None if given.finish_reason == RESCHEDULE else given.finish_reason
    return Start(token_ids, end, tells_from=num_own, rescore_from=scored_from if is_scored else None)


def _known(prepared: Prepared, start: Start, choice: Choice) -> ChoiceCursor:
    is_told = prepared.is_whole or not start.repeats_end
    return ChoiceCursor(choice.position, choice.finish_reason if is_told else None)


def _made(choice: Choice, given: GivenChoice) -> GivenChoice:
    """What there is of a choice now; one that is being scored again may be behind what was given."""
    if choice.position < len(given.token_ids):
        return given
    reason = choice.finish_reason
    return GivenChoice(list(choice.token_ids), None if reason == RESCHEDULE else reason)


def _sampling(prepared: Prepared, choice: int, max_tokens: int, eos_token_ids: Sequence[int]) -> Sampling:
    request = prepared.request
    ends = [] if request.ignore_eos else eos_token_ids
    return Sampling(
        seed=prepared.attempt.seed,
        choice=choice,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=max(0, request.top_k or 0),
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        end_token_ids=tuple(sorted({*ends, *(request.stop_token_ids or [])})),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        logit_bias=tuple(sorted((int(token_id), bias) for token_id, bias in (request.logit_bias or {}).items())),
        bad_words=prepared.bad_words,
        logprobs=request.num_logprobs,
        # The choices have one prompt: one look at it is enough.
        prompt_logprobs=request.prompt_logprobs if choice == 0 else None,
    )


def _order(prepared: Prepared, begun: Begun) -> Order:
    attempt, choice = prepared.attempt, begun.choice
    with_prompt = prepared.is_whole and choice.owes_prompt and choice.position
    return Order(
        request_id=choice.request_id,
        prompt_token_ids=prepared.prompt_token_ids,
        sampling=choice.sampling,
        generated_token_ids=list(choice.token_ids),
        arrival_s=attempt.arrival_s,
        deadline_at_s=prepared.deadline_at_s,
        priority=prepared.request.priority or 0,
        cache_salt=prepared.request.cache_salt or "",
        label=attempt.label,
        score_from=-1 if with_prompt else begun.start.rescore_from,
        attempt=attempt.epoch,
        num_cached_tokens=attempt.num_cached_tokens,
        prefill_peers=attempt.prefill_peers,
        may_move=prepared.is_routed,
    )
