"""Deliberate bugs in what one caller may cost another: threads, queues, bodies, refusals."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from onward.api.lifecycle import request_builder
from onward.api.lifecycle.request_builder import RequestBuilder
from onward.grammar.grammar_checker import GrammarChecker, GrammarCheckerProcess
from onward.proto.engine import ErrorInfo
from onward.router import client_request
from onward.router.client_stream import ClientStream as RouterStream
from onward.router.routing_tokenizer import RoutingTokenizer as RouterTokenizing
from onward.text import length_check, tokenizer
from onward.web import asgi, body_parts, json_body
from onward.web.caller_pacer import BODY_BYTE_RATE, BodyMemoryLimit, CallerPacer, RefusalPacer
from onward.web.fair_scheduler import FairScheduler, FairSchedulerLimits, RefusedWorkBudget
from onward.web.pacing_middleware import PacedBody
from tests.sabotage.patches import Patches, Sabotage

LENGTHS = "tests/text/test_length_check.py::"
QUEUE = "tests/web/test_fair_scheduler.py::"
PACE = "tests/web/test_caller_pacer.py::"
PACED = "tests/web/test_pacing_middleware.py::"
LARGE_BODIES = "test_large_bodies_of_a_caller_are_read_at_its_rate_and_small_ones_and_those_of_others_at_once"
WORK = "tests/api/test_preprocessing_executors.py::"


# Texts.


def _texts_are_tokenized_whatever_their_length(patch: Patches) -> None:
    patch.put(tokenizer, "check_text_length", lambda *_: None)


def _long_texts_are_tokenized_to_their_end(patch: Patches) -> None:
    patch.put(length_check, "PIECE_CHARS", 1 << 40)


def _normalizers_are_forgotten(patch: Patches) -> None:
    patch.put(tokenizer, "MAX_SHRINKAGE", 1)


def _a_router_tokenizes_whatever_comes(patch: Patches) -> None:
    patch.put(RouterTokenizing, "_max_tokens", lambda _: None)


# Queues.


def _first_come_first_served(patch: Patches) -> None:
    def ended(original: Callable, self: FairScheduler, caller: str, took_s: float, num_bytes: int = 0) -> None:
        original(self, caller, 0.0, num_bytes)

    patch.around(FairScheduler, "finish", ended)


def _one_caller_has_all_threads(patch: Patches) -> None:
    def order(original: Callable, self: FairScheduler, bounds: FairSchedulerLimits) -> None:
        original(self, replace(bounds, running_per_caller=bounds.running))

    patch.around(FairScheduler, "__init__", order)


def _all_callers_have_one_queue(patch: Patches) -> None:
    def order(original: Callable, self: FairScheduler, bounds: FairSchedulerLimits) -> None:
        original(self, replace(bounds, waiting_per_caller=bounds.waiting))

    patch.around(FairScheduler, "__init__", order)


def _bodies_are_not_counted(patch: Patches) -> None:
    def is_full(original: Callable, self: FairScheduler, caller: str, num_bytes: int = 0) -> bool:
        return original(self, caller, -(1 << 60))

    patch.around(FairScheduler, "is_full", is_full)


def _who_leaves_has_a_thread_to_spare(patch: Patches) -> None:
    def withdraw(original: Callable, self: FairScheduler, caller: str, work: object, num_bytes: int = 0) -> bool:
        if not original(self, caller, work, num_bytes):
            self._accounts[caller].num_running -= 1
        return True

    patch.around(FairScheduler, "cancel", withdraw)


def _who_leaves_is_served(patch: Patches) -> None:
    patch.put(FairScheduler, "cancel", lambda *_: False)


def _refusals_are_free(patch: Patches) -> None:
    patch.put(RefusedWorkBudget, "charge", lambda *_: None)


def _templates_take_text_threads(patch: Patches) -> None:
    def either(original: Callable, self: RequestBuilder, *args: Any, **kwargs: Any) -> Any:
        return self._prepare(*args, **kwargs)

    patch.around(RequestBuilder, "_prepare_or_defer", either)


def _grammars_wait_for_each_other(patch: Patches) -> None:
    def processes(original: Callable, self: GrammarChecker, spec: str, num: int = 1) -> None:
        original(self, spec, 1)

    patch.around(GrammarChecker, "__init__", processes)


def _the_next_caller_starts_the_process(patch: Patches) -> None:
    patch.put(GrammarCheckerProcess, "_replace_child", lambda _: None)


# Resumed streams.


def _an_instance_lets_resumed_streams_in(patch: Patches) -> None:
    def new_submit(original: Callable, prepared: Any, *args: Any) -> Any:
        submit = original(prepared, *args)
        return msgspec.structs.replace(submit, admit_as_new=bool(prepared.attempt.reader_positions))

    patch.around(request_builder, "_new_submit", new_submit)


def _a_router_says_that_resumed_streams_were_let_in(patch: Patches) -> None:
    def attempt(original: Callable, self: RouterStream, *args: Any) -> Any:
        made = original(self, *args)
        return msgspec.structs.replace(made, was_accepted=made.was_accepted or self.has_progress)

    patch.around(RouterStream, "build_attempt", attempt)


# Bodies.


def _errors_keep_bodies(patch: Patches) -> None:
    async def while_connected(receive: Any, work: Any) -> None:
        working = asyncio.ensure_future(work)
        await asyncio.wait([working])
        working.result()

    patch.put(asgi, "run_until_disconnect", while_connected)


def _parts_are_not_counted(patch: Patches) -> None:
    patch.put(json_body, "check_parts", lambda _: None)


def _a_router_does_not_count_parts(patch: Patches) -> None:
    patch.put(client_request, "check_parts", lambda _: None)


def _parts_within_strings_are_counted(patch: Patches) -> None:
    patch.put(body_parts, "num_parts", body_parts._count)


# The pace of each caller.


def _refused_callers_do_not_wait(patch: Patches) -> None:
    patch.put(RefusalPacer, "finish_request", lambda *_, **__: None)


def _refused_callers_go_on_together(patch: Patches) -> None:
    def begin(original: Callable, self: RefusalPacer, caller: str, now_s: float) -> float:
        wait_s = original(self, caller, now_s)
        if wait_s:
            self._rates.refund(caller, 1)
        return wait_s

    patch.around(RefusalPacer, "start_wait", begin)


def _all_refusals_are_the_callers_fault(patch: Patches) -> None:
    async def respond_error(original: Callable, send: Any, info: ErrorInfo, body: bytes | None = None) -> None:
        await original(send, msgspec.structs.replace(info, code="rate_limited"), body)

    patch.around(asgi, "respond_error", respond_error)


def _any_number_waits(patch: Patches) -> None:
    patch.put(RefusalPacer, "is_full", lambda *_: False)


def _bodies_are_read_at_any_rate(patch: Patches) -> None:
    def wait_s(original: Callable, self: CallerPacer, caller: str, now_s: float) -> float:
        return 0.0 if self._rate is BODY_BYTE_RATE else original(self, caller, now_s)

    patch.around(CallerPacer, "wait_s", wait_s)


def _bodies_are_held_in_any_number(patch: Patches) -> None:
    patch.put(BodyMemoryLimit, "try_reserve", lambda *_: True)


def _bodies_wait_for_each_other(patch: Patches) -> None:
    def take(original: Callable, self: BodyMemoryLimit, caller: str, body: object, num_bytes: int) -> bool:
        held = sum(self._held.get(caller, {}).values())
        return held + num_bytes <= self._max_bytes and original(self, caller, body, num_bytes)

    patch.around(BodyMemoryLimit, "try_reserve", take)


def _lost_bodies_are_held(patch: Patches) -> None:
    patch.put(PacedBody, "release", lambda _: None)


TABLE = [
    Sabotage(
        "parts-uncounted",
        "a body of millions of small lists is decoded while all other callers wait",
        _parts_are_not_counted,
        ["tests/web/test_body.py::test_a_body_of_very_many_small_parts_is_refused_before_it_is_decoded"],
    ),
    Sabotage(
        "router-does-not-count-parts",
        "the same in a router",
        _a_router_does_not_count_parts,
        ["tests/web/test_body.py::test_a_router_refuses_it_too"],
    ),
    Sabotage(
        "parts-within-strings",
        "a long text with many brackets is refused",
        _parts_within_strings_are_counted,
        ["tests/web/test_body_parts.py::test_texts_and_lists_of_tokens_of_any_length_pass"],
    ),
    Sabotage(
        "refused-callers-do-not-wait",
        "a caller that is refused again and again takes all the time of an api process",
        _refused_callers_do_not_wait,
        [PACED + "test_a_caller_that_is_refused_again_and_again_is_slowed_down_and_others_are_not"],
    ),
    Sabotage(
        "refused-callers-go-on-together",
        "requests that wait for the same caller go on at the same time",
        _refused_callers_go_on_together,
        [PACE + "test_requests_of_a_caller_that_is_refused_too_often_go_on_one_by_one"],
    ),
    Sabotage(
        "full-queues-slow-callers-down",
        "a caller waits for refusals that no limit of its own has caused",
        _all_refusals_are_the_callers_fault,
        [PACED + "test_refusals_for_other_reasons_than_its_limits_cost_a_caller_nothing"],
    ),
    Sabotage(
        "any-number-waits",
        "requests of a refused caller wait in any number",
        _any_number_waits,
        [PACE + "test_so_many_wait_and_no_more"],
    ),
    Sabotage(
        "bodies-at-any-rate",
        "large bodies of one caller are read as fast as they come",
        _bodies_are_read_at_any_rate,
        [PACED + LARGE_BODIES],
    ),
    Sabotage(
        "bodies-held-in-any-number",
        "bodies of one caller that are being received have no bound together",
        _bodies_are_held_in_any_number,
        [PACED + "test_bodies_that_do_not_end_hold_no_more_than_the_bound_and_one_body"],
    ),
    Sabotage(
        "bodies-wait-for-each-other",
        "where bodies of one caller have reached their bound, none of them goes on",
        _bodies_wait_for_each_other,
        [PACE + "test_bodies_of_a_caller_have_a_bound_and_the_oldest_always_goes_on"],
    ),
    Sabotage(
        "lost-bodies-are-held",
        "a body that has come, or whose client has gone, counts for ever",
        _lost_bodies_are_held,
        [PACED + "test_a_client_that_leaves_within_its_body_holds_nothing"],
    ),
    Sabotage(
        "errors-keep-bodies",
        "the body of a refused request is held until the next garbage collection",
        _errors_keep_bodies,
        ["tests/web/test_http.py::test_a_request_that_fails_leaves_nothing_for_the_garbage_collector"],
    ),
    Sabotage(
        "resumes-bypass-limits",
        "limits: a stream that is resumed by Last-Event-ID passes the limits of its caller and the queue's",
        _an_instance_lets_resumed_streams_in,
        [
            "tests/api/test_detached.py::test_a_resumed_stream_is_admitted_like_a_new_one_and_a_refusal_loses_nothing",
        ],
    ),
    Sabotage(
        "router-resumes-bypass-limits",
        "limits: the same behind a router",
        _a_router_says_that_resumed_streams_were_let_in,
        ["tests/router/test_app.py::test_a_resumed_stream_is_admitted_like_a_new_one_and_a_refusal_loses_nothing"],
    ),
    Sabotage(
        "first-come-first-served",
        "work of a caller is not charged to it",
        _first_come_first_served,
        [QUEUE + "test_the_caller_that_was_charged_least_is_next_whether_its_work_was_refused_or_not"],
    ),
    Sabotage(
        "one-caller-all-threads",
        "a single caller may occupy all threads",
        _one_caller_has_all_threads,
        [QUEUE + "test_one_caller_cannot_occupy_all_threads"],
    ),
    Sabotage(
        "one-queue-for-all",
        "a single caller may fill the queue",
        _all_callers_have_one_queue,
        [QUEUE + "test_queues_have_bounds_and_each_caller_its_own"],
    ),
    Sabotage(
        "bodies-uncounted",
        "a caller's bodies may wait in any number",
        _bodies_are_not_counted,
        [QUEUE + "test_bodies_that_wait_have_a_bound_and_one_is_always_taken"],
    ),
    Sabotage(
        "leavers-get-a-thread",
        "a caller that disconnects and comes back has further threads",
        _who_leaves_has_a_thread_to_spare,
        [QUEUE + "test_work_whose_client_has_gone_is_not_started_and_what_runs_counts_until_it_ends"],
    ),
    Sabotage(
        "leavers-are-served",
        "work whose client has gone is done",
        _who_leaves_is_served,
        [QUEUE + "test_work_whose_client_has_gone_is_not_started_and_what_runs_counts_until_it_ends"],
    ),
    Sabotage(
        "refusals-are-free",
        "a caller may cause refusals without end, however long they take",
        _refusals_are_free,
        [QUEUE + "test_refused_work_is_paid_for_and_other_work_is_not"],
    ),
    Sabotage(
        "templates-take-text-threads",
        "a client's template is rendered in a thread that texts need",
        _templates_take_text_threads,
        [WORK + "test_a_clients_template_occupies_no_thread_that_texts_need"],
    ),
    Sabotage(
        "grammars-wait-for-each-other",
        "one process compiles the grammars of all callers",
        _grammars_wait_for_each_other,
        ["tests/grammar/test_grammar_checker.py::test_a_grammar_that_takes_long_does_not_delay_another"],
    ),
    Sabotage(
        "next-caller-starts-the-process",
        "where a grammar has ended the process that compiles it, the next caller waits for another one to start",
        _the_next_caller_starts_the_process,
        ["tests/grammar/test_grammar_checker.py::test_what_is_too_much_ends_the_child_and_nobody_else"],
    ),
    Sabotage(
        "texts-of-any-length",
        "a text that cannot fit into the context is tokenized before it is refused",
        _texts_are_tokenized_whatever_their_length,
        [LENGTHS + "test_a_chats_prompt_is_refused_while_it_is_rendered"],
    ),
    Sabotage(
        "long-texts-to-their-end",
        "a text of too many tokens is tokenized to its end",
        _long_texts_are_tokenized_to_their_end,
        [LENGTHS + "test_a_long_text_is_tokenized_only_until_it_is_certain_that_it_does_not_fit"],
    ),
    Sabotage(
        "normalizers-forgotten",
        "a text that a normalizer makes shorter is refused although it fits",
        _normalizers_are_forgotten,
        [LENGTHS + "test_a_text_that_a_normalizer_makes_shorter_is_not_refused"],
    ),
    Sabotage(
        "router-tokenizes-all",
        "a router with a prefix policy tokenizes texts that no instance can hold",
        _a_router_tokenizes_whatever_comes,
        ["tests/router/test_routing_tokenizer.py::test_a_text_that_no_instance_can_hold_is_passed_on_as_it_came"],
    ),
]
