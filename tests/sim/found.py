"""Faults of shipped code that the simulator found, each as it was: put back, its scenario must violate again."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import msgspec

from onward.api.endpoints import attempts, close_attempt
from onward.api.engine_link.request_tracker import ChoiceSubmission, EngineOutput, RequestTracker
from onward.api.lifecycle import generation_runner, request_builder, resume, resume_fields
from onward.api.lifecycle.choice_output import ChoiceOutput, ChoiceStart
from onward.api.lifecycle.choice_update import ChoiceUpdate
from onward.api.lifecycle.generation_runner import GenerationEndpoint
from onward.api.lifecycle.request_output import OutputUpdate, RequestOutput
from onward.api.lifecycle.resume import STREAM_UNKNOWN, resumed_attempt
from onward.api.lifecycle.stream_formatters import CursorTracker
from onward.api.lifecycle.stream_registry import StreamRegistry
from onward.api.requests.schemas import GenerationRequest
from onward.api.responses import response_formatters, response_store, response_view
from onward.api.responses.response_formatters import ResponseFormatter
from onward.proto.cursor import Cursor
from onward.proto.engine import Submit
from onward.proto.finish_reasons import PD_RESCHEDULE
from onward.proto.router import ChoiceSnapshot
from onward.router import response_store as router_responses
from onward.router.client_stream import ClientStream
from onward.router.client_writer import ClientWriter
from onward.router.core import Dispatch
from onward.router.endpoints import generation
from onward.router.endpoints.responses import RouterResponsesEndpoint
from onward.router.response_store import ClusterResponseStore
from onward.router.stream_routing_state import StreamRoutingState
from onward.router.stream_runner import StreamRunner
from onward.sim import response_check
from onward.sim.invariants import InvariantMonitor
from onward.stream_store.entries import EntryTable
from onward.supervisor.core import SupervisorCore
from onward.web.json_body import compact_json
from tests.sabotage.patches import Patches


def a_cursor_names_a_place_behind_its_client(patch: Patches) -> None:
    def in_turn(original: Callable, self: RequestOutput, pieces: list[ChoiceUpdate]) -> list[ChoiceUpdate]:
        return pieces

    patch.around(RequestOutput, "_release_in_order", in_turn)


def the_usage_has_no_place_in_the_stream(patch: Patches) -> None:
    def at_usage(original: Callable, self: CursorTracker) -> None:
        return None

    patch.around(CursorTracker, "usage_cursor", at_usage)


def a_short_record_is_all_there_is(patch: Patches) -> None:
    async def generate(original: Callable, self: GenerationEndpoint, *args: Any) -> None:
        identity, body, cursor, _ = args
        if cursor is not None:
            record = await self._find_record(identity, cursor, require_reply=False)
            is_meant = record is not None and record.attempt.body == compact_json(body)
            if record is not None and is_meant and resumed_attempt(record.attempt, cursor) is None:
                raise STREAM_UNKNOWN
        await original(self, *args)

    patch.around(GenerationEndpoint, "generate", generate)


def a_choice_that_was_given_up_runs_again(patch: Patches) -> None:
    def start(original: Callable, given: ChoiceSnapshot, *rest: Any) -> ChoiceStart:
        if given.finish_reason == PD_RESCHEDULE:
            given = msgspec.structs.replace(given, finish_reason=None)
        return original(given, *rest)

    def made_again(original: Callable, attempt: Any, request: Any, cursor: Cursor) -> Any:
        choices = [
            msgspec.structs.replace(one, finish_reason=None) if one.finish_reason == PD_RESCHEDULE else one
            for one in cursor.choices
        ]
        return original(attempt, request, msgspec.structs.replace(cursor, choices=choices))

    patch.around(resume, "_stream_start", start)
    patch.around(request_builder, "regenerated_attempt", made_again)


def the_end_of_a_choice_that_is_made_again_is_told(patch: Patches) -> None:
    def take_skipped(
        original: Callable, self: RequestOutput, choice: ChoiceOutput, part: EngineOutput, progress: OutputUpdate
    ) -> None:
        before = len(progress.updates)
        original(self, choice, part, progress)
        if len(progress.updates) == before and choice.finish_reason is not None:
            progress.updates.append(ChoiceUpdate(choice.index, [], "", choice.finish_reason, is_known_to_reader=True))

    patch.around(RequestOutput, "_apply_known_output", take_skipped)
    # Seldom needed before: a router now asks around for a record that reaches to the client's place.
    patch.put(generation, "covers_cursor", lambda stream, place: True)


def the_first_word_to_an_engine_is_not_repeated(patch: Patches) -> None:
    def attempt(original: Callable, self: RequestTracker, submission: ChoiceSubmission, now_s: float) -> list[Submit]:
        sent = original(self, submission, now_s)
        submission.retry_at_s = None
        return sent

    patch.around(RequestTracker, "_resubmit", attempt)


def the_end_of_an_attempt_that_its_client_never_saw(patch: Patches) -> None:
    def forget(original: Callable, self: RequestTracker, submission: ChoiceSubmission) -> None:
        original(self, submission)
        self._finished_epochs.clear()

    patch.around(RequestTracker, "_remove", forget)


def scores_that_were_never_told_are_not_asked_for(patch: Patches) -> None:
    def of_answer(original: Callable, request: GenerationRequest, seed: int, answer: RequestOutput) -> dict[str, Any]:
        told = original(request, seed, answer)
        if request.rescore_from is None and "resume" in told:
            told["resume"].pop("rescore_from", None)
        return told

    patch.around(resume_fields, "resume_fields", of_answer)


def a_cancelled_response_ends_before_events_that_were_told(patch: Patches) -> None:
    patch.put(response_check, "_is_cancelled_or_failed", lambda event: False)


def a_response_is_forgotten_between_two_attempts(patch: Patches) -> None:
    def forget(original: Callable, self: EntryTable, record_id: str, epoch: int, caller: str, now_s: float) -> None:
        record = self.get(record_id, now_s)
        if record is not None and record.attempt_epoch <= epoch:
            self.drop(record_id)

    patch.around(EntryTable, "drop_superseded", forget)


def a_failure_is_numbered_before_the_place_of_its_client(patch: Patches) -> None:
    patch.put(ResponseFormatter, "has_sequence_numbers", False)


def a_response_is_lost_with_the_instance_that_finished_it(patch: Patches) -> None:
    async def keep_end(original: Callable, self: ClusterResponseStore, *end: Any) -> None:
        pass

    patch.around(ClusterResponseStore, "store_final", keep_end)
    patch.put(router_responses, "UNREACHABLE_WAIT_S", 0.0)


def a_response_that_was_given_up_cannot_be_told(patch: Patches) -> None:
    patch.put(response_view, "PD_PREEMPTED", None)


def who_comes_back_by_a_place_is_behind_who_followed_by_the_id(patch: Patches) -> None:
    patch.put(RouterResponsesEndpoint, "with_latest_epoch", generation.RouterGenerationEndpoint.with_latest_epoch)


def an_abort_discards_a_whole_answer(patch: Patches) -> None:
    patch.put(ClientStream, "is_out_of_reach_of_aborts", False)
    patch.put(close_attempt, "_seems_complete", lambda job: False)


def a_client_is_not_to_be_told_that_a_record_is_out_of_reach(patch: Patches) -> None:
    """A fault of the simulator: by the contract it is, if it only asks for the record."""
    patch.put(InvariantMonitor, "is_out_of_reach", lambda self: False)


def an_attempt_stays_listed_when_its_stream_is_cancelled_twice(patch: Patches) -> None:
    async def attempt(
        original: Callable, self: StreamRunner, route: StreamRoutingState, dispatch: Dispatch, client: ClientWriter
    ) -> None:
        request_id = route.stream.request_id
        assert request_id not in self._attempts, "two attempts are under way"
        task = asyncio.create_task(self._run_attempt(route, dispatch, client))
        self._attempts[request_id] = task
        try:
            await asyncio.wait((task,))
        finally:
            task.cancel()
            await asyncio.wait((task,))
            del self._attempts[request_id]
            self.core.on_attempt_ended(route, self.clock.now_s())

    patch.around(StreamRunner, "_attempt", attempt)


def a_resumed_response_loses_its_logprobs(patch: Patches) -> None:
    for module in (attempts, generation_runner, response_store):
        patch.put(module, "with_prior_logprobs", lambda prepared, record: prepared)


def a_failure_passes_tokens_that_wait_for_scores(patch: Patches) -> None:
    # Without this, tokens of a stored response have their logprobs from the start, and none of them wait.
    a_resumed_response_loses_its_logprobs(patch)
    patch.put(
        ResponseFormatter,
        "format_error",
        lambda self, info: [response_formatters.event_bytes(self._event_builder.fail(info))],
    )


def a_supervisor_is_not_to_pause_after_deaths_that_it_caused(patch: Patches) -> None:
    """A fault of the simulator: five deaths in a row make it pause, however they came about."""

    def may_pause(original: Callable, self: InvariantMonitor) -> bool:
        self._simulation.active_faults.num_killed_for_silence = 0
        return original(self)

    patch.around(InvariantMonitor, "may_pause", may_pause)
    # Its scenario led to a cool-down only while deaths under an isolated request counted one by one.
    deaths_under_isolated_requests_bring_a_cool_down(patch)


def deaths_under_isolated_requests_bring_a_cool_down(patch: Patches) -> None:
    patch.put(SupervisorCore, "_isolated_request_of", lambda self, child: None)


def a_cancel_passes_a_resume_in_the_same_process(patch: Patches) -> None:
    patch.put(StreamRegistry, "_block_attempts", lambda self, request_id: nullcontext())
