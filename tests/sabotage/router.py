"""Deliberate bugs in how a router retries, resumes and ends streams, and in what it knows of instances."""

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec

from onward.api.instance_description import OtherInstanceCounts
from onward.api.lifecycle import request_builder, resume
from onward.api.lifecycle.choice_output import ChoiceOutput, ChoiceStart
from onward.api.lifecycle.choice_update import ChoiceUpdate
from onward.api.lifecycle.request_builder import RequestBuilder
from onward.api.lifecycle.stream_registry import StreamRegistry
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.text_processor import TextProcessor
from onward.proto.engine import ErrorInfo, Submit
from onward.proto.router import Attempt, ChoiceSnapshot, Registration, RegistrationReply, StreamProgress
from onward.router import instance_registry, routing_policy
from onward.router.client_stream import AttemptFailure, ClientStream, FailureCause
from onward.router.client_writer import ClientWriter
from onward.router.core import AbortResult, Finish, RouterCore, StreamAction
from onward.router.endpoints import admin as router_admin
from onward.router.instance_registry import InstanceInfo, InstanceRegistry, Reservation
from onward.router.model_routing import ModelSelector
from onward.router.retry_budget import RetryBudget
from onward.router.retry_policy import RetryPolicy
from onward.router.stream_routing_state import StreamRoutingState
from onward.router.stream_runner import StreamRunner
from onward.router.upstream_client import UpstreamClient
from onward.router.upstream_connections import UpstreamConnectError, UpstreamConnection, UpstreamConnectionPool
from onward.router.upstream_events import BLANK_LINE, DONE, UpstreamEvent
from onward.text.detokenizer import Detokenizer
from onward.text.text_stream import TextStream
from onward.transport.http_urls import ServerUrl
from tests.sabotage.patches import Patches, Sabotage

ROWS = "tests/router/test_failures.py::"
SEVERAL_MODELS = "tests/router/test_several_models.py::"
REPLICAS = "tests/router/test_replicas.py::"
GENERATIONS = "tests/router/test_generations.py::"
ATTEMPTS = "tests/api/test_attempts.py::"
DRAINING = "tests/api/test_draining.py::"
UNUSABLE = "tests/router/test_app.py::test_an_unusable_address_is_not_taken_and_disturbs_no_request"
CHAT = "/v1/chat/completions"
CUTS_INSIDE_OF_CHARACTERS = (1, 3, 4, 5, 7, 8)


def _evict_streams_when_drained(patch: Patches) -> None:
    def drain(original: Callable, self: StreamRegistry) -> None:
        original(self)
        self.end_routed_streams()

    patch.around(StreamRegistry, "drain", drain)


def _evict_streams_although_no_other_instance_can_take_them(patch: Patches) -> None:
    patch.put(OtherInstanceCounts, "is_only_instance", False)


def _stay_drained(patch: Patches) -> None:
    patch.put(StreamRegistry, "undrain", lambda self: None)


def _never_return_to_a_drained_instance(patch: Patches) -> None:
    def note(
        original: Callable,
        self: RetryPolicy,
        route: StreamRoutingState,
        failed: AttemptFailure,
        instance: str,
        now_s: float,
    ) -> None:
        original(self, route, failed, instance, now_s)
        if failed.cause is FailureCause.DRAIN:
            route.refused_by.add(instance)

    patch.around(RetryPolicy, "_penalize_instance", note)


def _only_the_tail_is_told(patch: Patches) -> None:
    def start_whole(original: Callable, given: ChoiceSnapshot, *rest: object) -> ChoiceStart:
        return replace(original(given, *rest), emit_from=len(given.token_ids))

    patch.around(resume, "_whole_body_start", start_whole)


def _a_retry_starts_over(patch: Patches) -> None:
    def begin(original: Callable, self: ClientStream, *rest: object) -> None:
        self.choices = []
        original(self, *rest)

    patch.around(ClientStream, "begin_attempt", begin)


def _giving_up_is_a_way_to_finish(patch: Patches) -> None:
    async def fail(original: Callable, self: ClientWriter, info: ErrorInfo, body: bytes | None) -> None:
        self._stream.response_body = self._stream.response_body or b""
        await self.finish()

    patch.around(ClientWriter, "fail", fail)


def _only_the_first_choice_is_carried_on(patch: Patches) -> None:
    def attempt(original: Callable, self: ClientStream, *rest: object) -> Attempt:
        made: Attempt = original(self, *rest)
        others = [ChoiceSnapshot() for _ in made.choices[1:]]
        return msgspec.structs.replace(made, choices=[*made.choices[:1], *others])

    patch.around(ClientStream, "build_attempt", attempt)


def _retry_only(patch: Patches, is_worth_it: Callable[[ClientStream], bool]) -> None:
    def judge(
        original: Callable, self: RetryPolicy, route: StreamRoutingState, failed: AttemptFailure, *rest: object
    ) -> None:
        if is_worth_it(route.stream):
            original(self, route, failed, *rest)
        else:
            route.set_final_error(failed.error)

    patch.around(RetryPolicy, "on_attempt_failed", judge)


def _only_chat_is_retried(patch: Patches) -> None:
    _retry_only(patch, lambda stream: stream.request.path == CHAT)


def _only_whole_answers_are_retried(patch: Patches) -> None:
    _retry_only(patch, lambda stream: not stream.request.is_streaming)


def _what_was_generated_becomes_prompt(patch: Patches) -> None:
    def order(original: Callable, *args: object) -> Submit:
        made: Submit = original(*args)
        prompt = [*made.prompt_token_ids, *made.generated_token_ids]
        return msgspec.structs.replace(made, prompt_token_ids=prompt, generated_token_ids=[])

    patch.around(request_builder, "_new_submit", order)


def _limits_count_from_the_break(patch: Patches) -> None:
    def sampling(original: Callable, prepared: PreparedRequest, choice: int, max_tokens: int, *rest: object) -> object:
        given = [len(one.token_ids) for one in prepared.attempt.choices] or [0] * (choice + 1)
        return original(prepared, choice, max(1, max_tokens - given[choice]), *rest)

    patch.around(request_builder, "build_sampling_params", sampling)


def _stop_strings_are_looked_for_from_the_break_on(patch: Patches) -> None:
    def replay(original: Callable, self: ChoiceOutput, start: ChoiceStart) -> ChoiceUpdate | None:
        piece = original(self, replace(start, token_ids=()))
        self.token_ids = list(start.token_ids)
        return piece

    patch.around(ChoiceOutput, "replay", replay)


def _text_is_encoded_again(patch: Patches) -> None:
    def of_attempt(
        original: Callable, self: RequestBuilder, attempt: Attempt, *rest: object, **named: object
    ) -> PreparedRequest:
        prompts = self._services.text_processor
        choices = [ChoiceSnapshot(_encoded_again(prompts, one.token_ids), one.finish_reason) for one in attempt.choices]
        return original(self, msgspec.structs.replace(attempt, choices=choices), *rest, **named)

    patch.around(RequestBuilder, "prepare_attempt", of_attempt)


def _encoded_again(prompts: TextProcessor, token_ids: list[int]) -> list[int]:
    stream, text = TextStream.replay(token_ids, prompts._table)
    assert prompts._tokenizer is not None
    return prompts._tokenizer.encode(text + stream.finish("length"))


def _each_token_is_decoded_by_itself(patch: Patches) -> None:
    def push(original: Callable, self: Detokenizer, token_id: int) -> str:
        return self._pieces[token_id].decode("utf-8", "replace")

    patch.around(Detokenizer, "push", push)


def _any_sign_of_life_is_progress(patch: Patches) -> None:
    def hear(original: Callable, self: ClientStream, event: UpstreamEvent, now_s: float) -> bytes | None:
        self.last_progress_at_s = now_s
        return original(self, event, now_s)

    patch.around(ClientStream, "on_event", hear)


def _stalls_begin_with_the_first_byte(patch: Patches) -> None:
    def begin(original: Callable, self: ClientStream, *rest: object) -> None:
        original(self, *rest)
        self.last_progress_at_s = math.inf

    patch.around(ClientStream, "begin_attempt", begin)


def _only_tokens_are_progress(patch: Patches) -> None:
    def hear(original: Callable, self: ClientStream, event: UpstreamEvent, now_s: float) -> bytes | None:
        return None if isinstance(event, StreamProgress) else original(self, event, now_s)

    patch.around(ClientStream, "on_event", hear)


def _change_the_error(patch: Patches, change: Callable[[bytes], bytes]) -> None:
    async def write(original: Callable, self: ClientWriter, events: bytes) -> None:
        await original(self, change(events) if events.startswith(b"event: error") else events)

    patch.around(ClientWriter, "write", write)


def _no_error_event(patch: Patches) -> None:
    _change_the_error(patch, lambda events: DONE + BLANK_LINE)


def _no_end_behind_the_error(patch: Patches) -> None:
    _change_the_error(patch, lambda events: events.removesuffix(DONE + BLANK_LINE))


def _a_429_is_an_error_like_others(patch: Patches) -> None:
    def fail(original: Callable, self: ClientStream, cause: FailureCause, info: ErrorInfo, *rest: object) -> None:
        if cause is FailureCause.OVERLOADED:
            cause, info = FailureCause.ERROR, msgspec.structs.replace(info, retryable=True)
        original(self, cause, info, *rest)

    patch.around(ClientStream, "fail", fail)


def _the_connection_retries_too(patch: Patches) -> None:
    @asynccontextmanager
    async def attempt(original: Callable, self: UpstreamClient, *rest: object) -> AsyncIterator[object]:
        async with original(self, *rest) as response:
            if response.status == 200:
                yield response
                return
        async with original(self, *rest) as response:
            yield response

    patch.around(UpstreamClient, "send_attempt", attempt)


def _callers_share_a_retry_budget(patch: Patches) -> None:
    patch.around(RetryBudget, "_counters_of", lambda original, self, caller, now_s: original(self, "", now_s))


def _no_retry_budget(patch: Patches) -> None:
    patch.around(RetryBudget, "try_spend", lambda original, self, caller, now_s: True)


def _each_attempt_has_its_own_id(patch: Patches) -> None:
    def attempt(original: Callable, self: ClientStream, *rest: object) -> Attempt:
        made: Attempt = original(self, *rest)
        retry_id = f"{made.attempt_epoch:x}{made.request_id}"[:32]
        return msgspec.structs.replace(made, request_id=retry_id) if made.attempt_epoch > 1 else made

    patch.around(ClientStream, "build_attempt", attempt)


def _what_is_left_runs_on(patch: Patches) -> None:
    left: list[object] = []

    @asynccontextmanager
    async def attempt(original: Callable, self: UpstreamClient, *rest: object) -> AsyncIterator[object]:
        exchange = original(self, *rest)
        left.append(exchange)  # or else it is closed when it is collected
        yield await exchange.__aenter__()

    patch.around(UpstreamClient, "send_attempt", attempt)


def _instances_do_not_hear_of_aborts(patch: Patches) -> None:
    async def abort_at_instances(
        original: Callable, self: StreamRunner, asked: object
    ) -> tuple[set[str], dict[str, set[str]]]:
        return set(), {}

    patch.around(StreamRunner, "_abort_at_instances", abort_at_instances)


def _one_failed_probe_is_death(patch: Patches) -> None:
    def probed(
        original: Callable, self: InstanceRegistry, url: str, registration: Registration | None, now_s: float
    ) -> object:
        if registration is None and (member := self._find_by_url(url)) is not None:
            self._remove(member.registration.instance)
        return original(self, url, registration, now_s)

    patch.around(InstanceRegistry, "on_probe_result", probed)


def _all_probes_end_before_the_next_begin(patch: Patches) -> None:
    def due_probes(original: Callable, self: InstanceRegistry, now_s: float) -> list[str]:
        return [] if any(probe.under_way for probe in self._probes.values()) else original(self, now_s)

    patch.around(InstanceRegistry, "due_probes", due_probes)


def _probes_stand_in_line(patch: Patches) -> None:
    one_at_a_time = asyncio.Lock()

    async def probe(original: Callable, self: UpstreamClient, *rest: object) -> Registration | None:
        async with one_at_a_time:
            return await original(self, *rest)

    patch.around(UpstreamClient, "probe", probe)


def _any_http_url_is_an_address(patch: Patches) -> None:
    patch.put(instance_registry, "parse_server_url", lambda url: url)


def _only_the_kernel_s_errors_are_failed_connections(patch: Patches) -> None:
    async def connected(original: Callable, self: UpstreamConnectionPool, server: ServerUrl) -> UpstreamConnection:
        try:
            return await original(self, server)
        except UpstreamConnectError:
            socket.getaddrinfo(server.host, server.effective_port)
            raise

    patch.around(UpstreamConnectionPool, "_connect", connected)


def _a_registration_makes_an_instance_reachable(patch: Patches) -> None:
    def take(original: Callable, self: InstanceRegistry, registration: Registration, now_s: float) -> None:
        original(self, registration, now_s)
        self._clear_unreachable(registration.instance, registration.url)

    patch.around(InstanceRegistry, "_store", take)


def _strangers_register_other_machines(patch: Patches) -> None:
    patch.put(router_admin, "_is_on_another_machine", lambda url: False)


def _a_finish_beats_an_abort(patch: Patches) -> None:
    def next_step(original: Callable, self: RouterCore, route: StreamRoutingState, now_s: float) -> StreamAction:
        return Finish() if route.stream.is_complete else original(self, route, now_s)

    patch.around(RouterCore, "next_action", next_step)


def _a_failure_beats_an_abort(patch: Patches) -> None:
    def ended(original: Callable, self: RouterCore, route: StreamRoutingState, now_s: float) -> None:
        if route.stream.failure is not None:
            route.final_error = None
        original(self, route, now_s)

    patch.around(RouterCore, "on_attempt_ended", ended)


def _the_last_verdict_counts(patch: Patches) -> None:
    def settle(original: Callable, self: StreamRoutingState, verdict: ErrorInfo, body: bytes | None = None) -> None:
        self.final_error, self.final_error_body = verdict, body

    patch.around(StreamRoutingState, "set_final_error", settle)


def _an_abort_only_cuts(patch: Patches) -> None:
    def abort(original: Callable, self: RouterCore, *rest: object) -> AbortResult:
        aborted: AbortResult = original(self, *rest)
        for route in aborted.running:
            route.final_error = None
        return aborted

    patch.around(RouterCore, "abort", abort)


def _a_failed_dispatch_keeps_its_reservation(patch: Patches) -> None:
    def release(original: Callable, self: StreamRoutingState) -> None:
        if self.stream.was_accepted:
            original(self)

    patch.around(StreamRoutingState, "release_reservations", release)


def _prefills_stay_reserved(patch: Patches) -> None:
    def release(original: Callable, self: StreamRoutingState) -> None:
        self.prefill_reservations = []
        original(self)

    patch.around(StreamRoutingState, "release_reservations", release)


def _reservations_are_a_number(patch: Patches) -> None:
    def release(original: Callable, self: Reservation) -> None:
        if self._all:
            self._all.pop()

    patch.around(Reservation, "release", release)


def _reservations_outlive_their_incarnation(patch: Patches) -> None:
    def register(
        original: Callable, self: InstanceRegistry, registration: Registration, now_s: float
    ) -> RegistrationReply:
        answer = original(self, registration, now_s)
        if (member := self._members.get(registration.instance)) is not None:
            by_name = self.__dict__.setdefault("reservations_by_name", {})
            member.reservations = by_name.setdefault(registration.instance, member.reservations)
        return answer

    patch.around(InstanceRegistry, "register", register)


def _of_f41(stream: bool, *paths: str) -> list[str]:
    name = "test_f41_all_choices_all_endpoints_and_both_modes_are_carried_on"
    return [f"{ROWS}{name}[{stream}-{path}]" for path in paths]


def _of_f44(*cuts: int) -> list[str]:
    return [f"{ATTEMPTS}test_f44_ids_are_carried_and_text_is_never_encoded_again[{at}]" for at in cuts]


F40 = ROWS + "test_f40_after_a_retry_the_whole_answer_comes_back_and_after_the_last_one_an_error"
F43 = ATTEMPTS + "test_f43_what_depends_on_the_tokens_so_far_goes_on_and_does_not_start_over"
F45_LIVE = ROWS + "test_f45_a_live_connection_that_brings_nothing_is_left"
F46 = ROWS + "test_f46_when_all_attempts_fail_mid_stream_there_is_an_error_and_an_end"
F47_429 = ROWS + "test_f47_a_429_is_not_retried_against_the_same_instance_and_retries_do_not_multiply"
F48 = ROWS + "test_f48_an_abort_by_id_reaches_the_instance_that_has_it_now_and_both_sides_stop"
F50_CROSSING = ROWS + "test_f50_an_abort_that_crosses_another_end_stays_an_abort"


def _a_stream_goes_where_a_new_request_would(patch: Patches) -> None:
    def for_stream(_: Callable, self: ModelSelector, stream: ClientStream, now_s: float) -> str | None:
        return self.for_name(stream.request.model, stream.request_id, now_s)

    def set_model(_: Callable, self: RouterCore, stream: ClientStream, model: str, now_s: float) -> None:
        stream.model = model

    patch.around(ModelSelector, "for_stream", for_stream)
    patch.around(RouterCore, "_set_model", set_model)


def _the_first_model_is_the_only_one(patch: Patches) -> None:
    def for_name(original: Callable, self: ModelSelector, name: str, request_id: str, now_s: float) -> str | None:
        return original(self, name, request_id, now_s if name else self.settled_at_s)

    patch.around(ModelSelector, "for_name", for_name)


def _cursors_name_no_model(patch: Patches) -> None:
    patch.put(ClientStream, "model_tag", "")


def _prompts_are_computed_by_any_model(patch: Patches) -> None:
    def can_transfer(_: Callable, prefill: InstanceInfo, decode: InstanceInfo) -> bool:
        return (prefill.fingerprint, prefill.block_size) == (decode.fingerprint, decode.block_size)

    patch.around(routing_policy, "can_transfer_kv", can_transfer)


def _all_models_share_a_budget(patch: Patches) -> None:
    patch.put(ClientStream, "budget_key", ("", ""))


def _a_model_is_forgotten_with_its_last_instance(patch: Patches) -> None:
    patch.put(InstanceRegistry, "_remember_model", lambda self, registration: None)


def _keep_earlier_starts(patch: Patches) -> None:
    patch.put(InstanceRegistry, "_store_generation", lambda self, registration: None)


def _forget_generations(patch: Patches) -> None:
    patch.put(InstanceRegistry, "_generation_error", lambda self, new: None)


TABLE = [
    Sabotage(
        "tail-only",
        "F40: after a retry the answer is what the last attempt has made",
        _only_the_tail_is_told,
        [ATTEMPTS + "test_a_whole_answer_that_is_cut_anywhere_is_whole"],
    ),
    Sabotage(
        "retry-starts-over",
        "F40: a retry does not know what the client has, and tells it again",
        _a_retry_starts_over,
        [F40, *_of_f41(True, CHAT)],
    ),
    Sabotage(
        "empty-200",
        "F40: after the last attempt an empty answer stands for the error",
        _giving_up_is_a_way_to_finish,
        [F40, F46],
    ),
    Sabotage(
        "first-choice-only",
        "F41: a retry has the tokens of the first choice, and not those of the others",
        _only_the_first_choice_is_carried_on,
        [*_of_f41(True, CHAT, "/v1/generate"), *_of_f41(False, "/v1/completions")],
    ),
    Sabotage(
        "only-chat-retried",
        "F41: other endpoints than chat are not retried",
        _only_chat_is_retried,
        [*_of_f41(True, "/v1/completions", "/v1/generate"), *_of_f41(False, "/v1/completions", "/v1/generate")],
    ),
    Sabotage(
        "only-whole-retried",
        "F41: what streams is not retried",
        _only_whole_answers_are_retried,
        _of_f41(True, CHAT, "/v1/completions", "/v1/generate"),
    ),
    Sabotage(
        "output-becomes-prompt",
        "F43: min_tokens and penalties take what was generated for prompt",
        _what_was_generated_becomes_prompt,
        [F43],
    ),
    Sabotage(
        "limits-from-the-break",
        "F43: limits are those of the rest and are applied to the whole",
        _limits_count_from_the_break,
        [F43],
    ),
    Sabotage(
        "stop-strings-forget",
        "F43: a stop string across the break is not found",
        _stop_strings_are_looked_for_from_the_break_on,
        [F43],
    ),
    Sabotage(
        "text-encoded-again",
        "F44: the tokens so far are made from their text",
        _text_is_encoded_again,
        _of_f44(*CUTS_INSIDE_OF_CHARACTERS),
    ),
    Sabotage(
        "tokens-decoded-singly",
        "F44: each token is turned into text by itself",
        _each_token_is_decoded_by_itself,
        _of_f44(*range(1, 12)),
    ),
    Sabotage(
        "any-sign-is-progress",
        "F45: an instance that repeats that nothing moves counts as making progress",
        _any_sign_of_life_is_progress,
        [F45_LIVE],
    ),
    Sabotage(
        "no-first-byte-deadline",
        "F45: only a stream that has begun can stall",
        _stalls_begin_with_the_first_byte,
        [ROWS + "test_f45_an_instance_that_accepts_and_never_answers_is_left"],
    ),
    Sabotage(
        "only-tokens-are-progress",
        "F45: a long queue or prefill is taken for a stall",
        _only_tokens_are_progress,
        [ROWS + "test_f45_a_long_queue_or_prefill_is_no_stall"],
    ),
    Sabotage("no-error-event", "F46: a stream that was given up just ends", _no_error_event, [F46]),
    Sabotage(
        "no-done-behind-error", "F46: nothing says that the error was the end", _no_end_behind_the_error, [F46, F48]
    ),
    Sabotage("429-is-retried", "F47: an overloaded instance is asked again", _a_429_is_an_error_like_others, [F47_429]),
    Sabotage("retries-at-two-layers", "F47: the upstream client retries too", _the_connection_retries_too, [F47_429]),
    Sabotage(
        "no-retry-budget",
        "F47: every stream retries for itself, however many do",
        _no_retry_budget,
        [ROWS + "test_f47_an_outage_does_not_become_a_storm"],
    ),
    Sabotage(
        "shared-retry-budget",
        "the failing requests of one tenant use up the retries of another",
        _callers_share_a_retry_budget,
        ["tests/router/test_retry_budget.py::test_the_retries_of_one_caller_leave_those_of_another"],
    ),
    Sabotage("new-id-per-attempt", "F48: a retry has another id", _each_attempt_has_its_own_id, [F48]),
    Sabotage(
        "loser-runs-on",
        "F48: an instance whose attempt was left goes on working",
        _what_is_left_runs_on,
        [F48, F45_LIVE],
    ),
    Sabotage("abort-stays-here", "F48: no instance hears of an abort", _instances_do_not_hear_of_aborts, [F48]),
    Sabotage(
        "one-failed-probe-kills",
        "F49: an instance is gone with the first probe that fails",
        _one_failed_probe_is_death,
        [REPLICAS + "TestProbes::test_f49_one_failed_probe_is_not_death"],
    ),
    Sabotage(
        "probes-in-rounds",
        "F49: no instance is probed while one probe is under way",
        _all_probes_end_before_the_next_begin,
        [REPLICAS + "TestProbes::test_f49_one_hung_probe_does_not_delay_the_others"],
    ),
    Sabotage(
        "probes-in-line",
        "F49: probes are sent one after the other",
        _probes_stand_in_line,
        [ROWS + "test_f49_an_instance_that_answers_no_probe_holds_up_nobody_else"],
    ),
    Sabotage(
        "unusable-addresses",
        "whatever is registered as a URL is taken for an address",
        _any_http_url_is_an_address,
        [UNUSABLE + "[http://gpu-box..internal:23003]", UNUSABLE + "[http://127.0.0.1:99999]"],
    ),
    Sabotage(
        "resolver-errors-escape",
        "a connection that fails by an error of the resolver is a fault of the router",
        _only_the_kernel_s_errors_are_failed_connections,
        [
            "tests/router/test_upstream_connections.py::test_an_error_of_any_kind_while_connecting_is_a_failed_attempt[gpu-box..internal-1]"
        ],
    ),
    Sabotage(
        "registered-is-reachable",
        "an instance that registers is taken to be reachable",
        _a_registration_makes_an_instance_reachable,
        [REPLICAS + "TestUnreachable::test_an_instance_stays_suspect_until_a_probe_reaches_it"],
    ),
    Sabotage(
        "keyless-router-calls-anybody",
        "a router without a cluster key sends prompts to other machines",
        _strangers_register_other_machines,
        [UNUSABLE + "[http://gpu-box.internal:23003]"],
    ),
    Sabotage(
        "finish-beats-abort",
        "F50: an answer that was complete when it was aborted ends well",
        _a_finish_beats_an_abort,
        [F50_CROSSING + "[answer]"],
    ),
    Sabotage(
        "failure-beats-abort",
        "F50: an attempt that failed when it was aborted is judged by its failure",
        _a_failure_beats_an_abort,
        [F50_CROSSING + f"[{crossing}]" for crossing in ("lost", "refused", "final")],
    ),
    Sabotage(
        "last-verdict-counts",
        "F50: what happens after an abort decides how it ends",
        _the_last_verdict_counts,
        [F50_CROSSING],
    ),
    Sabotage(
        "abort-only-cuts",
        "F50: an abort ends the attempt, and another one follows",
        _an_abort_only_cuts,
        [ROWS + "test_f50_how_an_aborted_stream_ends_is_decided_once", F48],
    ),
    Sabotage(
        "failed-dispatch-stays-reserved",
        "F51: an attempt that was never accepted keeps its reservation",
        _a_failed_dispatch_keeps_its_reservation,
        [ROWS + "test_f51_nothing_stays_booked_when_a_dispatch_fails"],
    ),
    Sabotage(
        "prefill-stays-reserved",
        "F51: the prefill instance of a failed attempt keeps its reservation",
        _prefills_stay_reserved,
        [ROWS + "test_f51_nothing_stays_booked_when_a_dispatch_fails"],
    ),
    Sabotage(
        "reservations-are-a-number",
        "F51: a reservation that is released twice is counted twice",
        _reservations_are_a_number,
        [
            REPLICAS
            + "TestBookings::test_f51_a_booking_whose_dispatch_failed_is_given_back_however_often_it_is_released",
            REPLICAS
            + "TestBookings::test_f51_bookings_are_those_taken_since_it_came_and_not_given_back_whatever_the_order",
        ],
    ),
    Sabotage(
        "reservations-outlive",
        "F51: a new incarnation inherits the reservations of the old one",
        _reservations_outlive_their_incarnation,
        [REPLICAS + "TestBookings::test_f51_bookings_end_with_their_incarnation"],
    ),
    Sabotage(
        "drain-evicts",
        "a drained instance ends the streams of routers, although there may be no other instance for them",
        _evict_streams_when_drained,
        [DRAINING + "test_streams_end_where_they_are_and_nothing_new_begins"],
    ),
    Sabotage(
        "stop-evicts-last",
        "the last instance ends the streams of routers at once when it is told to stop",
        _evict_streams_although_no_other_instance_can_take_them,
        [DRAINING + "test_streams_that_no_other_instance_can_take_have_the_grace_of_a_stop"],
    ),
    Sabotage(
        "undrain-ignored",
        "an instance that is taken back into service goes on refusing requests",
        _stay_drained,
        [DRAINING + "test_an_instance_can_be_taken_back_into_service"],
    ),
    Sabotage(
        "drained-for-good",
        "a stream never returns to an instance that was drained, also after it was taken back into service",
        _never_return_to_a_drained_instance,
        ["tests/router/test_core.py::test_a_stream_may_return_to_an_instance_that_was_taken_back_into_service"],
    ),
    Sabotage(
        "stream-crosses-versions",
        "a stream whose client has tokens goes on with another version where no instance of its own is alive",
        _a_stream_goes_where_a_new_request_would,
        [
            SEVERAL_MODELS + "test_after_the_first_token_no_other_version_goes_on_and_the_error_names_its_own",
            "tests/router/test_core.py::"
            "test_a_stream_waits_for_its_version_and_then_its_error_names_it_and_may_be_tried_again",
        ],
    ),
    Sabotage(
        "version-lost-with-the-router",
        "cursors do not say which version made the tokens",
        _cursors_name_no_model,
        [
            SEVERAL_MODELS + "test_a_client_comes_back_to_another_router_and_gets_its_version",
            SEVERAL_MODELS + "test_a_stream_without_a_model_keeps_its_model_where_another_one_is_served_later",
        ],
    ),
    Sabotage(
        "model-chosen-too-early",
        "a router that has just started takes the first model that registers for the only one",
        _the_first_model_is_the_only_one,
        ["tests/router/test_core.py::test_the_only_model_is_chosen_once_every_instance_has_had_time_to_register"],
    ),
    Sabotage(
        "kv-of-another-model",
        "a prefill instance of another model computes prompts, where its numerics go by the same name",
        _prompts_are_computed_by_any_model,
        ["tests/router/test_routing_policy.py::TestPairs::test_prefill_instances_of_another_model_are_not_paired"],
    ),
    Sabotage(
        "one-budget-for-all-versions",
        "a version that fails uses up the retries of the other one",
        _all_models_share_a_budget,
        ["tests/router/test_core.py::test_retries_at_one_version_use_up_none_of_the_other"],
    ),
    Sabotage(
        "lost-model-is-unknown",
        "a model is not served any more as soon as its last instance has gone",
        _a_model_is_forgotten_with_its_last_instance,
        [SEVERAL_MODELS + "test_a_model_whose_instances_are_gone_is_waited_for_and_not_unknown"],
    ),
    Sabotage(
        "two-under-one-name",
        "an instance that was started anew on another machine is registered beside its old start",
        _keep_earlier_starts,
        [GENERATIONS + "test_a_new_start_replaces_the_old_one_at_once"],
    ),
    Sabotage(
        "old-start-comes-back",
        "an old start of an instance is registered again after the new one has gone",
        _forget_generations,
        [GENERATIONS + "test_an_old_start_stays_refused_after_the_new_one_has_gone"],
    ),
]
