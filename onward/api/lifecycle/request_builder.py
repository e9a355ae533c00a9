"""Turns a request into submissions to the engine. Everything about it is fixed and checked here before it is submitted.

Every request is an `Attempt`. For a plain client's request, id, seed and times are fixed here; for a routed one the router
has done so. An Attempt is all that is needed to continue a request later, here or elsewhere. Knows nothing of HTTP.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from onward.api.engine_link.engine_client import EngineClient, LoadShedder, OutputCollector
from onward.api.engine_link.request_tracker import MAX_ATTEMPT, base_epoch
from onward.api.lifecycle import resume_fields
from onward.api.lifecycle.choice_output import ChoiceOutput, ChoiceStart
from onward.api.lifecycle.choice_update import ChoiceUpdate
from onward.api.lifecycle.endpoint_adapter import EndpointAdapter, ObjectHeader, OutputJsonWriter
from onward.api.lifecycle.request_metrics import RequestLatencyMetrics
from onward.api.lifecycle.request_output import RequestOutput
from onward.api.lifecycle.resume import (
    STREAM_UNKNOWN,
    choice_snapshot,
    choice_starts,
    prior_choices,
    reader_position,
    regenerated_attempt,
    tokens_before_end,
)
from onward.api.requests.message_parser_factory import check_forced_end
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.preprocessing_executors import DeferredRender, PreprocessingExecutors
from onward.api.requests.request_context import RequestContext
from onward.api.requests.sampling_builder import build_sampling_params, end_token_ids
from onward.api.requests.schemas import GenerationRequest, TextGenerationRequest, ValidationContext
from onward.api.requests.structured_outputs import output_grammar
from onward.api.requests.text_processor import TextProcessor
from onward.api.requests.unsupported_fields import UnknownFieldReporter, reject_unknown_fields
from onward.api.requests.validation import check_allowed_ends, check_prompt_ids, check_token_ids
from onward.clock import Clock
from onward.config import ApiConfig
from onward.errors import RETRY_SOON_S, Unavailable
from onward.obs.tracer import Tracer
from onward.output_limits import output_limit
from onward.proto import SCHEMA_VERSION
from onward.proto.cursor import Cursor
from onward.proto.engine import Submit
from onward.proto.model import PreparedModel
from onward.proto.router import Attempt
from onward.proto.step import TokenLogprobs, WorkerHello
from onward.random_source import SEED_BITS, RandomSource
from onward.text.stop_patterns import StopPatterns
from onward.web.json_body import compact_json, field_error
from onward.web.openai_api.model_names import with_model
from onward.web.task_pool import TaskPool

MAX_REPLAYED_TOKENS = 1 << 31
"""Output limit of a choice that is only replayed. Its real limit applied when the tokens were generated."""


@dataclass(frozen=True, slots=True)
class ApiServices:
    """The objects that all endpoints of an api process share."""

    config: ApiConfig
    model: PreparedModel
    text_processor: TextProcessor
    engine_client: EngineClient
    clock: Clock
    executors: PreprocessingExecutors
    """Thread pools for texts, grammars and templates. This work may take long and must not delay the streams."""
    unknown_fields: UnknownFieldReporter
    random: RandomSource
    load_shedder: LoadShedder
    latency: RequestLatencyMetrics
    tasks: TaskPool = field(default_factory=TaskPool)
    tracer: Tracer | None = None
    """None: tracing is off."""


def validation_context(services: ApiServices) -> ValidationContext:
    config, model = services.config, services.model
    return ValidationContext(
        model.name,
        model.config.vocab_size,
        config.max_choices,
        config.trust_request_chat_template,
        model_aliases=model.aliases,
    )


def new_attempt(context: RequestContext, path: str, body: bytes, seed: int, **limits: Any) -> Attempt:
    """Returns the first attempt at a request that a client has sent to this instance."""
    return Attempt(
        schema_version=SCHEMA_VERSION,
        path=path,
        body=body,
        request_id=context.request_id,
        attempt_epoch=1,
        seed=seed,
        created_s=context.created_s,
        client_request_id=context.client_request_id,
        caller=context.caller.name,
        caller_limits=context.caller.limits,
        caller_priority=context.caller.priority,
        trace=context.access.trace_context,
        **limits,
    )


@dataclass(slots=True)
class ActiveRequest:
    """A request that runs, with its output so far and the collector of its engine outputs."""

    header: ObjectHeader
    prepared: PreparedRequest
    writer: OutputJsonWriter
    output: RequestOutput
    collector: OutputCollector | None
    """None if there is nothing left to generate."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Logprobs of all tokens so far, if the response is stored."""

    @property
    def replayed_updates(self) -> list[ChoiceUpdate]:
        """The updates about given tokens that this response must send: the ends of choices, or, if it needs the full
        output, all of their tokens."""
        updates = (choice.replayed_update for choice in self.output.choices)
        return [update for update in updates if update is not None]

    @property
    def pending_ends(self) -> list[ChoiceUpdate]:
        """The updates about choices that have ended with their given tokens."""
        return [] if self.prepared.needs_full_output else self.replayed_updates

    def keep_logprobs(self, updates: list[ChoiceUpdate]) -> None:
        if self.prepared.request.is_stored:
            for update in updates:
                self.logprobs.extend(update.logprobs or ())

    def note_end(self, wall_s: float) -> None:
        """Notes the time if the output is complete now, and an earlier attempt has not completed it before."""
        if self.output.is_finished and self.header.completed_s is None:
            self.header = replace(self.header, completed_s=max(self.header.created_s, int(wall_s)))

    def resume_fields(self) -> dict[str, Any]:
        """Returns the fields beside the choices by which a client continues an incomplete response."""
        attempt = self.prepared.attempt
        fields = resume_fields.resume_fields(self.prepared.request, attempt.seed, self.output)
        if fields and attempt.model_tag:
            # The name in the client's request may be routed to another model next time.
            fields["resume"] |= {"model": self.header.model}
        if fields and attempt.max_prompt_tokens is not None:
            # An instance with another context would cut the prompt to another length.
            fields["resume"] |= {"truncate_prompt_tokens": attempt.max_prompt_tokens}
        return fields

    def partial_stream_body(self) -> dict[str, object] | None:
        """Returns `partial` of the error that ends a stream, without the text, which the client already has. None: there
        is no output."""
        return resume_fields.partial_choices(self.output) | self.resume_fields() if self.output.has_partial else None

    def next_attempt(self, now_s: float) -> Attempt:
        """Returns the attempt with all tokens so far, from which another attempt continues."""
        prepared, usage = self.prepared, self.output.usage()
        knows_cached_tokens = any(choice.num_cached_tokens is not None for choice in self.output.choices)
        return msgspec.structs.replace(
            prepared.attempt,
            choices=[
                choice_snapshot(choice, prior)
                for choice, prior in zip(self.output.choices, prior_choices(prepared), strict=True)
            ],
            num_cached_tokens=usage.cached_tokens if knows_cached_tokens else None,
            waited_s=max(0.0, now_s - prepared.arrived_at_s),
            deadline_in_s=None if prepared.deadline_at_s is None else max(0.0, prepared.deadline_at_s - now_s),
            prefill_peers=[],
            is_final=False,
            completed_s=self.header.completed_s,
        )


class RequestBuilder:
    """Makes the PreparedRequests and ActiveRequests of one endpoint."""

    def __init__(self, adapter: EndpointAdapter, path: str, services: ApiServices) -> None:
        self.adapter = adapter
        self.path = path
        self._services = services
        self._validation_context = validation_context(services)

    def prepare_client_request(
        self, context: RequestContext, body: bytes, cursor: Cursor | None = None
    ) -> PreparedRequest | DeferredRender[PreparedRequest]:
        """Prepares a client's own request. Runs in a thread. `cursor`: the client has the stream up to this point, and its
        tokens are stored nowhere, so it is generated again."""
        request, unknown = self.adapter.decode(body, self._validation_context)
        if self._services.config.strict_fields and cursor is None:
            reject_unknown_fields(unknown)
        if not request.model:
            # Another server, which may serve several models, must know which one has generated the tokens.
            body = with_model(body, self._services.model.name)
        seed = self._services.random.bits(SEED_BITS) if request.seed is None else request.seed
        attempt = new_attempt(
            context,
            self.path,
            body,
            seed,
            deadline_in_s=self._deadline(request),
            default_max_tokens=self._services.config.default_max_tokens,
        )
        if cursor is not None:
            attempt = regenerated_attempt(attempt, request, cursor)
        prepared = self._prepare_or_defer(attempt, request, unknown, context.started_at_s, is_routed=False)
        return (
            DeferredRender(lambda: _with_compact_body(prepared.call()))
            if isinstance(prepared, DeferredRender)
            else _with_compact_body(prepared)
        )

    def prepare_attempt(
        self, attempt: Attempt, started_at_s: float, *, is_routed: bool
    ) -> PreparedRequest | DeferredRender[PreparedRequest]:
        """Prepares an attempt. Runs in a thread."""
        request, unknown = self.adapter.decode(attempt.body, self._validation_context)
        # A stream that has begun elsewhere is continued, even if this instance is stricter about unknown fields.
        is_new = not (attempt.was_accepted or attempt.choices or attempt.reader_positions)
        if is_new and (self._services.config.strict_fields or attempt.strict_fields):
            reject_unknown_fields(unknown)
        self._check(attempt, request)
        return self._prepare_or_defer(attempt, request, unknown, started_at_s, is_routed=is_routed)

    def start(self, prepared: PreparedRequest, limits: WorkerHello) -> ActiveRequest:
        """Submits the choices that have not ended yet, and returns the running request."""
        limit = self._output_limits(prepared, limits)
        choices = [
            self._start_choice(prepared, index, limit[index], start)
            for index, start in enumerate(choice_starts(prepared))
        ]
        now_s = self._services.clock.now_s()
        trace = prepared.attempt.trace if self._services.tracer is not None else None
        trace_id = trace.trace_id if trace is not None and trace.is_sampled else ""
        specs = [_new_submit(prepared, choice, now_s, trace_id) for choice in choices if choice.finish_reason is None]
        return self._active_request(prepared, choices, self._submit(prepared, specs) if specs else None)

    def replay_finished(self, prepared: PreparedRequest) -> ActiveRequest:
        """Returns a request that ends with its given tokens: nothing is generated, and no token is rescored."""
        choices = [
            self._replay(prepared, index, MAX_REPLAYED_TOKENS, replace(start, rescore_from=None, reader_position=None))
            for index, start in enumerate(choice_starts(prepared))
        ]
        return self._active_request(prepared, choices, None)

    def _active_request(
        self, prepared: PreparedRequest, choices: list[ChoiceOutput], collector: OutputCollector | None
    ) -> ActiveRequest:
        active = ActiveRequest(
            header=self.object_header(prepared.attempt),
            prepared=prepared,
            writer=self.adapter.json_writer(prepared),
            output=RequestOutput(
                prepared.prompt_token_ids,
                choices,
                is_all_or_nothing=prepared.request.selects_best,
                reports_drafts=bool(prepared.request.return_speculative_stats),
                returns_text=self.adapter.returns_text,
                hides_tokens=prepared.request.only_echoes,
            ),
            collector=collector,
        )
        active.keep_logprobs(active.replayed_updates)
        return active

    def _output_limits(self, prepared: PreparedRequest, limits: WorkerHello) -> list[int]:
        """Returns the output limit of each choice. Refuses prompts that do not fit."""
        request = prepared.request
        max_tokens, field_name, min_tokens = (
            request.max_output_tokens,
            request.output_limit_field,
            request.min_tokens or 0,
        )
        default = prepared.attempt.default_max_tokens if request.has_default_limit else 0
        return [
            output_limit(len(prompt), max_tokens, min_tokens, limits, path, field_name, default)
            for index, prompt in enumerate(prepared.prompt_token_ids)
            for path in [self.adapter.prompt_path(request, index)] * request.num_candidates
        ]

    def _submit(self, prepared: PreparedRequest, specs: list[Submit]) -> OutputCollector:
        is_new = not (prepared.is_routed or prepared.is_resumed)
        return self._services.engine_client.submit(specs, is_new=is_new, wake_each_second=prepared.is_routed)

    def _prepare_or_defer(
        self,
        attempt: Attempt,
        request: GenerationRequest,
        unknown: tuple[str, ...],
        started_at_s: float,
        *,
        is_routed: bool,
    ) -> PreparedRequest | DeferredRender[PreparedRequest]:
        def prepare() -> PreparedRequest:
            return self._prepare(attempt, request, unknown, started_at_s, is_routed=is_routed)

        renders = request.client_template is not None and attempt.prompt_token_ids is None
        return DeferredRender(prepare) if renders else prepare()

    def _prepare(
        self,
        attempt: Attempt,
        request: GenerationRequest,
        unknown: tuple[str, ...],
        started_at_s: float,
        *,
        is_routed: bool,
    ) -> PreparedRequest:
        if isinstance(request, TextGenerationRequest) and request.cuts_to_what_fits:
            max_prompt_tokens = attempt.max_prompt_tokens or self._longest_prompt(request)
            request = request.with_longest_prompt(max_prompt_tokens)
            attempt = msgspec.structs.replace(attempt, max_prompt_tokens=max_prompt_tokens)
        prompt_token_ids = attempt.prompt_token_ids
        prompts = (
            self.adapter.tokenize_prompts(request, attempt.created_s)
            if prompt_token_ids is None
            else [prompt_token_ids]
        )
        if request.truncation is not None:
            # Applies to a router's prompt tokens too, which may be those of a client.
            prompts = [request.truncation.cut(prompt) for prompt in prompts]
        tools = request.resolved_tools()
        grammar = output_grammar(request, tools)
        reasoning = self.adapter.reasoning_params(request, prompts, has_grammar=grammar is not None)
        end_ids = end_token_ids(request, self._services.model.eos_token_ids)
        check_forced_end(reasoning, end_ids, request.min_tokens or 0)
        check_allowed_ends(request, end_ids)
        stop_patterns = request.stop_patterns()
        return PreparedRequest(
            attempt=attempt,
            request=request,
            unknown_fields=unknown,
            prompt_token_ids=prompts,
            bad_word_token_ids=self._services.text_processor.tokenize_bad_words(request.bad_words or []),
            arrived_at_s=started_at_s - attempt.waited_s,
            deadline_at_s=None if attempt.deadline_in_s is None else started_at_s + attempt.deadline_in_s,
            is_routed=is_routed,
            tools=tools,
            stop_patterns=StopPatterns(stop_patterns) if stop_patterns else None,
            grammar=grammar,
            reasoning=reasoning,
        )

    def _longest_prompt(self, request: GenerationRequest) -> int:
        """Returns the length of the longest prompt that leaves room for the requested output."""
        worker = self._services.engine_client.worker
        if worker is None:
            raise Unavailable("the engine is not there yet", retry_after_s=RETRY_SOON_S)
        return max(1, worker.max_request_tokens - (request.max_output_tokens or request.min_tokens or 1))

    async def validate_grammar(self, prepared: PreparedRequest) -> PreparedRequest:
        """Validates the request's grammar before any work is done, and refuses one that cannot be used. Sets
        `grammar_completed_at` in the returned request: for each choice, how many given tokens complete the grammar,
        or None."""
        if prepared.grammar is None:
            return prepared
        stop_token_ids = end_token_ids(prepared.request, self._services.model.eos_token_ids)
        min_tokens = prepared.request.min_tokens or 0
        prior_token_ids = [
            tokens_before_end(choice.token_ids, stop_token_ids, min_tokens) for choice in prior_choices(prepared)
        ]
        path = "choices" if prepared.attempt.choices else prepared.request.resumed_field
        validator, queue, caller = (
            self._services.text_processor.grammar_validator,
            self._services.executors.grammars,
            prepared.attempt.caller,
        )
        completed_at = validator.validate(queue, caller, prepared.grammar, prior_token_ids, path, prepared.reasoning)
        return replace(prepared, grammar_completed_at=await completed_at)

    def _deadline(self, request: GenerationRequest) -> float | None:
        if request.deadline_ms is not None:
            return request.deadline_ms / 1000
        return self._services.config.default_deadline_s

    def _check(self, attempt: Attempt, request: GenerationRequest) -> None:
        if not 1 <= attempt.attempt_epoch <= MAX_ATTEMPT:
            raise field_error("attempt_epoch", f"must be between 1 and {MAX_ATTEMPT}, got {attempt.attempt_epoch}")
        for field_name, values in (("choices", attempt.choices), ("reader_positions", attempt.reader_positions)):
            if values and len(values) != request.num_choices:
                raise field_error(field_name, f"must be one per choice ({request.num_choices}), got {len(values)}")
        if attempt.reader_positions and not self._services.model.is_exact:
            raise STREAM_UNKNOWN
        for index, choice in enumerate(attempt.choices):
            check_token_ids(f"choices[{index}].token_ids", choice.token_ids, self._validation_context)
        if attempt.prompt_token_ids is not None:
            check_prompt_ids("prompt_token_ids", attempt.prompt_token_ids, self._validation_context)
            if request.num_prompts != 1:
                raise field_error("prompt_token_ids", "must not be given for a request that lists prompts")

    def _start_choice(self, prepared: PreparedRequest, index: int, max_tokens: int, start: ChoiceStart) -> ChoiceOutput:
        choice = self._replay(prepared, index, max_tokens, start)
        needs_logprobs = start.rescore_from is not None or (
            prepared.needs_full_output and choice.awaits_prompt_logprobs
        )
        if choice.finish_reason is None or not needs_logprobs:
            return choice
        if start.emit_from is None or choice.position <= start.emit_from:
            problem = f"choice {index} has ended with the given tokens, so nothing is computed that could score them"
            raise field_error("rescore_from", f"{problem} again")
        # Only a running choice is scored, so its last token is generated again. The reader's position stays as it was.
        given_token_ids, rescore_from = choice.token_ids[:-1], start.rescore_from
        if start.logprobs and len(start.logprobs) >= len(given_token_ids):
            rescore_from = None
        start = ChoiceStart(
            given_token_ids, emit_from=start.emit_from, rescore_from=rescore_from, logprobs=start.logprobs
        )
        scored = self._replay(prepared, index, choice.position, start)
        scored.reader_start = choice.reader_start
        return scored

    def _replay(self, prepared: PreparedRequest, index: int, max_tokens: int, start: ChoiceStart) -> ChoiceOutput:
        """Returns a choice that has replayed its given tokens."""
        choice = self._new_choice(prepared, index, max_tokens)
        choice.replayed_update = choice.replay(start)
        choice.rescore_from, choice.start_position = start.rescore_from, choice.position
        choice.reader_start = reader_position(prepared, start, choice)
        return choice

    def replay_choice(self, prepared: PreparedRequest) -> ChoiceOutput:
        """Returns the only choice of a response that is rebuilt from its tokens. Nothing is generated."""
        return self._new_choice(prepared, 0, MAX_REPLAYED_TOKENS)

    def object_header(self, attempt: Attempt) -> ObjectHeader:
        model = self._services.model
        return ObjectHeader(
            self.adapter.id_prefix + attempt.request_id,
            attempt.created_s,
            model.name,
            model.fingerprint,
            attempt.completed_s,
        )

    def _new_choice(self, prepared: PreparedRequest, index: int, max_tokens: int) -> ChoiceOutput:
        model = self._services.model
        sampling = build_sampling_params(prepared, index, max_tokens, model.eos_token_ids, model.sampling_defaults)
        text_stream = self.adapter.new_text_stream(prepared, sampling)
        offsets = None if sampling.logprobs is None else self._services.text_processor.new_text_offsets()
        num_cached_tokens = prepared.num_cached_tokens
        request_id = f"{prepared.attempt.request_id}-{index}"
        completed_at = prepared.grammar_completed_at[index] if prepared.grammar_completed_at else None
        return ChoiceOutput(
            index,
            request_id,
            sampling,
            text_stream,
            offsets,
            num_cached_tokens=num_cached_tokens,
            grammar_completed_at=completed_at,
        )


def _with_compact_body(prepared: PreparedRequest) -> PreparedRequest:
    """Returns the request with its body in the stored form, without whitespace. This runs last, so that a large body is
    copied only if its texts fit."""
    attempt = prepared.attempt
    return replace(prepared, attempt=msgspec.structs.replace(attempt, body=compact_json(attempt.body)))


def _new_submit(prepared: PreparedRequest, choice: ChoiceOutput, now_s: float, trace_id: str) -> Submit:
    """Returns the Submit of a choice. The tracker sets its `seq` when it is sent."""
    attempt = prepared.attempt
    rescores_prompt = prepared.returns_whole_body and choice.awaits_prompt_logprobs and choice.position
    return Submit(
        seq=0,
        request_id=choice.request_id,
        epoch=base_epoch(attempt.attempt_epoch),
        prompt_token_ids=prepared.prompt_of(choice.index),
        sampling_params=choice.sampling,
        generated_token_ids=list(choice.token_ids),
        waited_s=now_s - prepared.arrived_at_s,
        deadline_in_s=None if prepared.deadline_at_s is None else prepared.deadline_at_s - now_s,
        priority=clamp_priority(prepared.request.priority, attempt.caller_priority),
        cache_salt=prepared.request.cache_salt or "",
        client_request_id=attempt.client_request_id,
        caller=attempt.caller,
        caller_limits=attempt.caller_limits,
        admit_as_new=not attempt.was_accepted,
        rescore_from=-1 if rescores_prompt else choice.rescore_from,
        num_cached_tokens=prepared.num_cached_tokens,
        prefill_peers=attempt.prefill_peers,
        is_routed=prepared.is_routed,
        max_draft_tokens=prepared.request.max_drafts,
        trace_id=trace_id,
    )


def clamp_priority(requested: int | None, best_allowed: int | None) -> int:
    """Returns the requested priority, but none better than the caller is allowed."""
    if best_allowed is None:
        return requested or 0
    return best_allowed if requested is None else max(requested, best_allowed)
