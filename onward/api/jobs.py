"""From a request to work for the engine: everything about it is fixed and checked here, before the engine hears of it.

Whoever asks, a request is an `Attempt`: of a plain client's we fix id, seed and times ourselves, a router has done so
before. That is all that is needed to go on with it later, here or elsewhere. Knows nothing of HTTP.
"""

from dataclasses import dataclass, field, replace

import msgspec

from onward.api import continuing
from onward.api.answer import Answer
from onward.api.choice import Choice, Start
from onward.api.dialect import Dialect, Head, Writer
from onward.api.engine_client import EngineClient, Mailbox
from onward.api.fullness import Fullness
from onward.api.identity import Identity
from onward.api.known_fields import refuse_unknown
from onward.api.ledger import MAX_ATTEMPT, Order
from onward.api.limits import output_limit
from onward.api.pieces import Piece
from onward.api.prepared import Prepared
from onward.api.prompts import Prompts
from onward.api.request_checks import check_prompt_ids, check_token_ids
from onward.api.requests import Bounds, GenerationRequest
from onward.api.sampling import end_token_ids, sampling_of
from onward.api.starts import STREAM_UNKNOWN, given_of, known_of, made_again, made_of, starts_of, text_before_end
from onward.api.thinking import check_ends
from onward.api.tool_grammar import structure_of
from onward.api.unknown_fields import UnknownFields
from onward.api.work_queues import ByTemplate, WorkQueues
from onward.chance import SEED_BITS, Chance
from onward.clock import Clock
from onward.config import ApiConfig
from onward.proto import SCHEMA_VERSION
from onward.proto.cursor import ChoiceCursor, Cursor
from onward.proto.model import PreparedModel
from onward.proto.router import Attempt
from onward.proto.step import TokenLogprobs, WorkerHello
from onward.web.body import compact, wrong
from onward.web.tasks import Tasks

MAX_RETOLD = 1 << 31
"""Tokens of an answer that has been made: whatever bounded it then."""


@dataclass(frozen=True, slots=True)
class Backend:
    """What every request needs."""

    config: ApiConfig
    model: PreparedModel
    prompts: Prompts
    client: EngineClient
    clock: Clock
    queues: WorkQueues
    """For texts, grammars and templates, which may take long and must not hold up anybody's tokens."""
    unknown_fields: UnknownFields
    chance: Chance
    fullness: Fullness
    tasks: Tasks = field(default_factory=Tasks)


def bounds_of(backend: Backend) -> Bounds:
    config, model = backend.config, backend.model
    return Bounds(model.name, model.config.vocab_size, config.max_choices, config.trust_request_chat_template)


@dataclass(frozen=True, slots=True)
class Job:
    """A request on its way."""

    head: Head
    prepared: Prepared
    writer: Writer
    answer: Answer
    positions: list[int]
    """Where each choice goes on from."""
    known: list[ChoiceCursor]
    """Of each choice, what whoever follows the tokens has of it."""
    replayed: list[Piece]
    """What there is to tell about given tokens: the ends of choices; for a whole answer all of it."""
    mailbox: Mailbox | None
    """None if there is nothing left to generate."""
    scores: list[TokenLogprobs] = field(default_factory=list)
    """Of all tokens so far, where they are to be kept with them."""

    @property
    def closing(self) -> list[Piece]:
        """The ends of choices whose given tokens had ended already."""
        return [] if self.prepared.tells_all else self.replayed

    def note_scores(self, pieces: list[Piece]) -> None:
        if self.prepared.request.is_stored:
            for piece in pieces:
                self.scores.extend(piece.logprobs or ())

    def to_continue(self) -> dict[str, object]:
        """What stands beside the last choice, if this answer is to be continued elsewhere."""
        return continuing.of_answer(self.prepared.request, self.prepared.attempt.seed, self.answer)

    def after_failure(self) -> dict[str, object]:
        """What stands beside the choices of `partial`."""
        return continuing.how_to_resume(self.prepared.request, self.prepared.attempt.seed, self.answer)

    def partial_of_stream(self) -> dict[str, object] | None:
        """`partial` next to the error that ends a stream."""
        return continuing.of_failed_stream(self.prepared.request, self.prepared.attempt.seed, self.answer)

    def attempt_from_here(self, now_s: float) -> Attempt:
        """The same request with all tokens that were made."""
        prepared, usage = self.prepared, self.answer.usage()
        cached_is_known = any(choice.num_cached_tokens is not None for choice in self.answer.choices)
        return msgspec.structs.replace(
            prepared.attempt,
            choices=[
                made_of(choice, known) for choice, known in zip(self.answer.choices, given_of(prepared), strict=True)
            ],
            num_cached_tokens=usage.cached_tokens if cached_is_known else None,
            waited_s=max(0.0, now_s - prepared.arrived_at_s),
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
        self._bounds = bounds_of(backend)

    def of_client(
        self, identity: Identity, body: bytes, cursor: Cursor | None = None
    ) -> Prepared | ByTemplate[Prepared]:
        """Runs in a thread. With a cursor, the client has the answer up to there, and nobody else has it."""
        request, unknown = self.dialect.decode(body, self._bounds)
        if self._backend.config.strict_fields and cursor is None:
            refuse_unknown(unknown)
        seed = self._backend.chance.bits(SEED_BITS) if request.seed is None else request.seed
        attempt = Attempt(
            schema_version=SCHEMA_VERSION,
            path=self.path,
            body=body,
            request_id=identity.request_id,
            epoch=1,
            seed=seed,
            created_s=identity.created_s,
            label=identity.label,
            deadline_s=self._deadline(request),
            default_max_tokens=self._backend.config.default_max_tokens,
            caller=identity.caller.name,
            caller_limits=identity.caller.limits,
            caller_priority=identity.caller.priority,
        )
        if cursor is not None:
            attempt = made_again(attempt, request, cursor)
        made = self._prepared_or_apart(attempt, request, unknown, identity.started_at_s, is_routed=False)
        return ByTemplate(lambda: _to_keep(made.call())) if isinstance(made, ByTemplate) else _to_keep(made)

    def of_attempt(self, attempt: Attempt, started_at_s: float, *, is_routed: bool) -> Prepared | ByTemplate[Prepared]:
        """Runs in a thread."""
        request, unknown = self.dialect.decode(attempt.body, self._bounds)
        # A stream that has begun elsewhere is continued, however strict this instance is.
        is_new = not (attempt.was_taken or attempt.choices or attempt.skip_to)
        if is_new and (self._backend.config.strict_fields or attempt.strict_fields):
            refuse_unknown(unknown)
        self._check(attempt, request)
        return self._prepared_or_apart(attempt, request, unknown, started_at_s, is_routed=is_routed)

    def start(self, prepared: Prepared, limits: WorkerHello) -> Job:
        """Asks the engine for whatever is not there yet."""
        limit = self._output_limits(prepared, limits)
        begun = [self._begin(prepared, index, limit[index], start) for index, start in enumerate(starts_of(prepared))]
        orders = [_order(prepared, one) for one in begun if one.choice.finish_reason is None]
        return self._job(prepared, begun, self._open(prepared, orders) if orders else None)

    def closed(self, prepared: Prepared) -> Job:
        """For an answer that ends where its tokens end: nothing is generated, and no token is scored again."""
        begun: list[Begun] = []
        for index, start in enumerate(starts_of(prepared)):
            choice, start = self._choice(prepared, index, MAX_RETOLD), replace(start, rescore_from=None, skip_to=None)
            begun.append(Begun(choice, start, choice.replay(start), known_of(prepared, start, choice)))
        return self._job(prepared, begun, None)

    def _job(self, prepared: Prepared, begun: list[Begun], mailbox: Mailbox | None) -> Job:
        choices = [one.choice for one in begun]
        return Job(
            head=self.head_of(prepared.attempt),
            prepared=prepared,
            writer=self.dialect.writer(prepared),
            answer=Answer(
                prepared.prompts,
                choices,
                is_all_or_nothing=prepared.request.picks_best,
                tells_drafts=bool(prepared.request.return_speculative_stats),
                shows_text=self.dialect.shows_text,
            ),
            positions=[one.choice.position for one in begun],
            known=[one.known for one in begun],
            replayed=[one.piece for one in begun if one.piece is not None],
            mailbox=mailbox,
        )

    def _output_limits(self, prepared: Prepared, limits: WorkerHello) -> list[int]:
        """How long each choice may become. Refuses prompts that do not fit."""
        request = prepared.request
        asked, field_name, least = request.output_limit, request.output_limit_field, request.min_tokens or 0
        default = prepared.attempt.default_max_tokens if request.has_default_limit else 0
        return [
            output_limit(len(prompt), asked, least, limits, path, field_name, default)
            for index, prompt in enumerate(prepared.prompts)
            for path in [self.dialect.prompt_path(request, index)] * request.num_candidates
        ]

    def _open(self, prepared: Prepared, orders: list[Order]) -> Mailbox:
        is_new = not (prepared.is_routed or prepared.is_continued)
        return self._backend.client.open(orders, is_new=is_new, with_nudges=prepared.is_routed)

    def _prepared_or_apart(
        self,
        attempt: Attempt,
        request: GenerationRequest,
        unknown: tuple[str, ...],
        started_at_s: float,
        *,
        is_routed: bool,
    ) -> Prepared | ByTemplate[Prepared]:
        def prepared() -> Prepared:
            return self._prepared(attempt, request, unknown, started_at_s, is_routed=is_routed)

        renders = request.own_template is not None and attempt.prompt_token_ids is None
        return ByTemplate(prepared) if renders else prepared()

    def _prepared(
        self,
        attempt: Attempt,
        request: GenerationRequest,
        unknown: tuple[str, ...],
        started_at_s: float,
        *,
        is_routed: bool,
    ) -> Prepared:
        made = attempt.prompt_token_ids
        prompts = self.dialect.prompts(request, attempt.created_s) if made is None else [made]
        plan = request.tool_plan()
        structure = structure_of(request, plan)
        thinking = self.dialect.thinking(request, prompts, has_grammar=structure is not None)
        check_ends(thinking, end_token_ids(request, self._backend.model.eos_token_ids), request.min_tokens or 0)
        return Prepared(
            attempt=attempt,
            request=request,
            unknown_fields=unknown,
            prompts=prompts,
            bad_words=self._backend.prompts.bad_words(request.bad_words or []),
            arrived_at_s=started_at_s - attempt.waited_s,
            deadline_at_s=None if attempt.deadline_s is None else started_at_s + attempt.deadline_s,
            is_routed=is_routed,
            plan=plan,
            structure=structure,
            thinking=thinking,
        )

    async def with_checked_structure(self, prepared: Prepared) -> Prepared:
        """Refuses a grammar that cannot be used, before any work is done."""
        if prepared.structure is None:
            return prepared
        ends = end_token_ids(prepared.request, self._backend.model.eos_token_ids)
        min_tokens = prepared.request.min_tokens or 0
        given = [text_before_end(choice.token_ids, ends, min_tokens) for choice in given_of(prepared)]
        path = "choices" if prepared.attempt.choices else prepared.request.resumed_field
        gate, queue, caller = self._backend.prompts.gate, self._backend.queues.grammars, prepared.attempt.caller
        passed = gate.pass_through(queue, caller, prepared.structure, given, path, prepared.thinking)
        return replace(prepared, grammar_ends=await passed)

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
        if attempt.skip_to and not self._backend.model.is_exact:
            raise STREAM_UNKNOWN
        for index, choice in enumerate(attempt.choices):
            check_token_ids(f"choices[{index}].token_ids", choice.token_ids, self._bounds)
        if attempt.prompt_token_ids is not None:
            check_prompt_ids("prompt_token_ids", attempt.prompt_token_ids, self._bounds)
            if request.num_prompts != 1:
                raise wrong("prompt_token_ids", "must not be given for a request that lists prompts")

    def _begin(self, prepared: Prepared, index: int, max_tokens: int, start: Start) -> Begun:
        choice = self._choice(prepared, index, max_tokens)
        piece = choice.replay(start)
        begun = Begun(choice, start, piece, known_of(prepared, start, choice))
        wants_scores = start.rescore_from is not None or (prepared.tells_all and choice.owes_prompt)
        if choice.finish_reason is None or not wants_scores:
            return begun
        if start.tells_from is None or choice.position <= start.tells_from:
            problem = f"choice {index} has ended with the given tokens, so nothing is computed that could score them"
            raise wrong("rescore_from", f"{problem} again")
        # Only what runs is scored, so the last token is made again. Whoever follows the tokens need not know.
        start = Start(choice.token_ids[:-1], tells_from=start.tells_from, rescore_from=start.rescore_from)
        choice = self._choice(prepared, index, choice.position)
        return Begun(choice, start, choice.replay(start), begun.known)

    def retold(self, prepared: Prepared) -> Choice:
        """The only choice of an answer that is told again from its tokens. Nothing is generated."""
        return self._choice(prepared, 0, MAX_RETOLD)

    def head_of(self, attempt: Attempt) -> Head:
        model = self._backend.model
        return Head(self.dialect.id_prefix + attempt.request_id, attempt.created_s, model.name, model.fingerprint)

    def _choice(self, prepared: Prepared, index: int, max_tokens: int) -> Choice:
        model = self._backend.model
        sampling = sampling_of(prepared, index, max_tokens, model.eos_token_ids, model.sampling_defaults)
        text = self.dialect.new_text(prepared, sampling)
        offsets = None if sampling.logprobs is None else self._backend.prompts.new_offsets()
        cached = prepared.num_cached_tokens
        request_id = f"{prepared.attempt.request_id}-{index}"
        end = prepared.grammar_ends[index] if prepared.grammar_ends else None
        return Choice(index, request_id, sampling, text, offsets, num_cached_tokens=cached, grammar_end=end)


def _to_keep(prepared: Prepared) -> Prepared:
    """With its body as it is kept. Another copy of a large body is made only when its texts are known to fit."""
    attempt = prepared.attempt
    return replace(prepared, attempt=msgspec.structs.replace(attempt, body=compact(attempt.body)))


def _order(prepared: Prepared, begun: Begun) -> Order:
    attempt, choice = prepared.attempt, begun.choice
    with_prompt = prepared.is_whole and choice.owes_prompt and choice.position
    return Order(
        request_id=choice.request_id,
        prompt_token_ids=prepared.prompt_of(choice.index),
        sampling=choice.sampling,
        generated_token_ids=list(choice.token_ids),
        arrived_at_s=prepared.arrived_at_s,
        deadline_at_s=prepared.deadline_at_s,
        priority=priority_within(prepared.request.priority, attempt.caller_priority),
        cache_salt=prepared.request.cache_salt or "",
        label=attempt.label,
        caller=attempt.caller,
        caller_limits=attempt.caller_limits,
        asks_anew=not attempt.was_taken,
        score_from=-1 if with_prompt else begun.start.rescore_from,
        attempt=attempt.epoch,
        num_cached_tokens=prepared.num_cached_tokens,
        prefill_peers=attempt.prefill_peers,
        may_move=prepared.is_routed,
        max_drafts=prepared.request.max_drafts,
    )


def priority_within(asked: int | None, best: int | None) -> int:
    """As the request says, but no better than its caller may ask for."""
    if best is None:
        return asked or 0
    return best if asked is None else max(asked, best)
