"""Faults of shipped code that the simulator found, each as it was: put back, its scenario must violate again."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from onward.api import closing, continuing, jobs, starts
from onward.api.answer import Answer, Progress
from onward.api.choice import Choice, Start
from onward.api.cursors import Cursors
from onward.api.generation import GenerationEndpoint
from onward.api.ledger import RESCHEDULE, Delivery, Ledger, Promise
from onward.api.pieces import Piece
from onward.api.requests import GenerationRequest
from onward.api.responses import form, view
from onward.api.responses.form import ResponseForm
from onward.api.starts import STREAM_UNKNOWN
from onward.engine.main import EngineProcess
from onward.proto.control import Stop, ToChild
from onward.proto.cursor import Cursor
from onward.proto.request import Submit
from onward.proto.router import GivenChoice
from onward.router import generation
from onward.router import responses as router_responses
from onward.router.client_side import ClientSide
from onward.router.core import Dispatch
from onward.router.response_creation import ResponseCreation
from onward.router.responses import FoundResponses
from onward.router.route import Route
from onward.router.serving import Serving
from onward.router.stream import Stream
from onward.shelf.records import Records
from onward.sim import responses
from onward.sim.invariants import Watch
from onward.web.body import compact
from tests.sabotage_kinds import Patches


def a_cursor_names_a_place_behind_its_client(patch: Patches) -> None:
    def in_turn(original: Callable, self: Answer, pieces: list[Piece]) -> list[Piece]:
        return pieces

    patch.around(Answer, "_in_turn", in_turn)


def the_usage_has_no_place_in_the_stream(patch: Patches) -> None:
    def at_usage(original: Callable, self: Cursors) -> None:
        return None

    patch.around(Cursors, "at_usage", at_usage)


def a_short_record_is_all_there_is(patch: Patches) -> None:
    async def generate(original: Callable, self: GenerationEndpoint, *args: Any) -> None:
        identity, body, cursor, _ = args
        if cursor is not None and await self._next_attempt(identity, cursor, must_answer=False) is None:
            record = await self._streams.find(cursor.request_id)
            if record is not None and record.attempt.body == compact(body):
                raise STREAM_UNKNOWN
        await original(self, *args)

    patch.around(GenerationEndpoint, "generate", generate)


def a_choice_that_was_given_up_runs_again(patch: Patches) -> None:
    def start(original: Callable, given: GivenChoice, *rest: Any) -> Start:
        if given.finish_reason == RESCHEDULE:
            given = msgspec.structs.replace(given, finish_reason=None)
        return original(given, *rest)

    def made_again(original: Callable, attempt: Any, request: Any, cursor: Cursor) -> Any:
        choices = [
            msgspec.structs.replace(one, finish_reason=None) if one.finish_reason == RESCHEDULE else one
            for one in cursor.choices
        ]
        return original(attempt, request, msgspec.structs.replace(cursor, choices=choices))

    patch.around(starts, "_start_stream", start)
    patch.around(jobs, "made_again", made_again)


def the_end_of_a_choice_that_is_made_again_is_told(patch: Patches) -> None:
    def take_skipped(original: Callable, self: Answer, choice: Choice, part: Delivery, progress: Progress) -> None:
        before = len(progress.pieces)
        original(self, choice, part, progress)
        if len(progress.pieces) == before and choice.finish_reason is not None:
            progress.pieces.append(Piece(choice.index, [], "", choice.finish_reason, skipped=True))

    patch.around(Answer, "_take_skipped", take_skipped)
    # Seldom needed before: a router now asks around for a record that reaches to the client's place.
    patch.put(generation, "reaches", lambda stream, place: True)


def the_first_word_to_an_engine_is_not_repeated(patch: Patches) -> None:
    def attempt(original: Callable, self: Ledger, promise: Promise, now_s: float) -> list[Submit]:
        sent = original(self, promise, now_s)
        promise.retry_at_s = None
        return sent

    patch.around(Ledger, "_attempt", attempt)


def the_end_of_an_attempt_that_its_client_never_saw(patch: Patches) -> None:
    def forget(original: Callable, self: Ledger, promise: Promise) -> None:
        original(self, promise)
        self._ended.clear()

    patch.around(Ledger, "_forget", forget)


def scores_that_were_never_told_are_not_asked_for(patch: Patches) -> None:
    def of_answer(original: Callable, request: GenerationRequest, seed: int, answer: Answer) -> dict[str, Any]:
        told = original(request, seed, answer)
        if request.rescore_from is None and "resume" in told:
            told["resume"].pop("rescore_from", None)
        return told

    patch.around(continuing, "of_answer", of_answer)


def a_cancelled_response_ends_before_events_that_were_told(patch: Patches) -> None:
    patch.put(responses, "_is_cut", lambda event: False)


def a_response_is_forgotten_between_two_attempts(patch: Patches) -> None:
    def forget(original: Callable, self: Records, record_id: str, epoch: int, caller: str, now_s: float) -> None:
        record = self.get(record_id, now_s)
        if record is not None and record.epoch <= epoch:
            self.drop(record_id)

    patch.around(Records, "forget", forget)


def a_failure_is_numbered_before_the_place_of_its_client(patch: Patches) -> None:
    patch.put(ResponseForm, "has_numbers", False)


def a_response_is_lost_with_the_instance_that_finished_it(patch: Patches) -> None:
    async def keep_end(original: Callable, self: FoundResponses, *end: Any) -> None:
        pass

    patch.around(FoundResponses, "keep_end", keep_end)
    patch.put(router_responses, "REACH_S", 0.0)


def a_response_that_was_given_up_cannot_be_told(patch: Patches) -> None:
    patch.put(view, "GIVEN_UP", None)


def who_comes_back_by_a_place_is_behind_who_followed_by_the_id(patch: Patches) -> None:
    patch.put(ResponseCreation, "behind_all", generation.GenerationEndpoint.behind_all)


def an_engine_goes_on_after_its_farewell(patch: Patches) -> None:
    def on_control(original: Callable, self: EngineProcess, message: ToChild, now_s: float) -> None:
        if isinstance(message, Stop):
            self._say_goodbye()
        else:
            original(self, message, now_s)

    patch.around(EngineProcess, "_on_control", on_control)


def an_abort_discards_a_whole_answer(patch: Patches) -> None:
    patch.put(Stream, "is_out_of_reach_of_aborts", False)
    patch.put(closing, "_seems_complete", lambda job: False)


def a_client_is_not_to_be_told_that_a_record_is_out_of_reach(patch: Patches) -> None:
    """A fault of the simulator: by the contract it is, if it only asks for the record."""
    patch.put(Watch, "is_out_of_reach", lambda self: False)


def an_event_of_another_end_is_compared_with_the_end(patch: Patches) -> None:
    """A fault of the simulator: where records may be lost, a response may be shown with another end."""

    def take_new(original: Callable, self: responses.Response, event: dict[str, Any]) -> None:
        try:
            original(self, event)
        except responses.OtherEnd:
            self.events.append(event)
            raise

    patch.around(responses.Response, "_take_new", take_new)


def an_attempt_stays_listed_when_its_stream_is_cancelled_twice(patch: Patches) -> None:
    async def attempt(original: Callable, self: Serving, route: Route, dispatch: Dispatch, client: ClientSide) -> None:
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
            self.core.ended(route, self.clock.now_s())

    patch.around(Serving, "_attempt", attempt)


def a_failure_passes_tokens_that_wait_for_scores(patch: Patches) -> None:
    patch.put(ResponseForm, "failed", lambda self, info: [form.event_bytes(self._teller.failed(info))])


def a_supervisor_is_not_to_pause_after_deaths_that_it_caused(patch: Patches) -> None:
    """A fault of the simulator: five deaths in a row make it pause, however they came about."""

    def may_pause(original: Callable, self: Watch) -> bool:
        self._world.weather.num_killed_for_silence = 0
        return original(self)

    patch.around(Watch, "may_pause", may_pause)
