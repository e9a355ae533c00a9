"""Deliberate bugs in Ollama's API: its lines, errors and requests."""

from collections.abc import Callable
from typing import Any

from onward.api import app as api_app
from onward.router import app as router_app
from onward.web import inner_requests
from onward.web.ollama_api import ollama_answers, ollama_conversion, ollama_endpoints, ollama_errors, ollama_options
from onward.web.ollama_api.ollama_answers import OllamaAnswerWriter
from tests.sabotage.patches import Patches, Sabotage

CLIENT = "tests/api/ollama/test_client.py::"
WRONG = "tests/api/ollama/test_bad_input.py::"
ROUTED = "tests/api/ollama/test_behind_router.py::"
ENDPOINTS = "tests/web/test_ollama_endpoints.py::"


def _forget_the_unread_part(patch: Patches) -> None:
    def lines(original: Callable, self: OllamaAnswerWriter, events: bytes, wall_s: float) -> bytes:
        self._unread = b""
        return original(self, events, wall_s)

    patch.around(OllamaAnswerWriter, "lines", lines)


def _return_cut_calls(patch: Patches) -> None:
    def close(original: Callable, self: Any, *, is_cut: bool) -> Any:
        has_call, name = self._index is not None, self._name
        calls, _ = original(self, is_cut=is_cut)
        return (calls, "") if calls or not has_call else ([{"function": {"name": name, "arguments": {}}}], "")

    patch.around(ollama_answers._CallBuffer, "close", close)


def _leave_errors_in_openai_s_form(patch: Patches) -> None:
    patch.put(api_app, "with_ollama_errors", lambda scope, send: send)


def _leave_routed_errors_in_openai_s_form(patch: Patches) -> None:
    patch.put(router_app, "with_ollama_errors", lambda scope, send: send)


def _name_fields_of_the_chat(patch: Patches) -> None:
    patch.put(ollama_errors, "_client_field", lambda param, kind: param)


def _pass_unknown_fields_on(patch: Patches) -> None:
    patch.put(ollama_conversion, "UNKNOWN_PREFIX", "")


def _take_part_in_resuming(patch: Patches) -> None:
    def inner_scope(original: Callable, scope: Any, path: str, send: Any) -> Any:
        return {**original(scope, path, send), "headers": scope["headers"]}

    patch.around(inner_requests, "inner_scope", inner_scope)


def _accept_every_option(patch: Patches) -> None:
    patch.put(ollama_options, "_check_refused", lambda options: None)


def _lose_messages(patch: Patches) -> None:
    patch.put(ollama_conversion, "to_chat", lambda messages: [{"role": "user", "content": "x"} for _ in messages])


def _end_failed_streams_in_silence(patch: Patches) -> None:
    def last_line(original: Callable, self: Any, times: Any) -> bytes:
        return original(self, times) if self._writer.is_finished else b""

    patch.around(ollama_endpoints._LineSend, "_last_line", last_line)


TABLE = [
    Sabotage(
        "ollama-failed-streams-end-well",
        "a stream of Ollama's API that has failed ends as a complete one",
        _end_failed_streams_in_silence,
        [ENDPOINTS + "test_a_stream_that_ends_before_its_output_does_ends_with_an_error_line"],
    ),
    Sabotage(
        "ollama-events-cut",
        "an event that arrives in two parts is lost",
        _forget_the_unread_part,
        ["tests/fuzz/test_fuzz.py::test_every_case_is_taken_or_cleanly_refused[ollama_lines]"],
    ),
    Sabotage(
        "ollama-cut-calls",
        "a tool call that was cut is returned as a call without arguments",
        _return_cut_calls,
        [CLIENT + "test_a_call_that_was_cut_is_no_call[True]"],
    ),
    Sabotage(
        "ollama-errors-of-openai",
        "errors of Ollama's API have OpenAI's form",
        _leave_errors_in_openai_s_form,
        [WRONG + "test_every_refusal_has_ollama_s_form"],
    ),
    Sabotage(
        "routed-ollama-errors-of-openai",
        "errors of Ollama's API at a router have OpenAI's form",
        _leave_routed_errors_in_openai_s_form,
        [ROUTED + "test_refusals_have_ollama_s_form"],
    ),
    Sabotage(
        "ollama-fields-of-chats",
        "errors of Ollama's API name the fields of the converted request",
        _name_fields_of_the_chat,
        [ROUTED + "test_refusals_have_ollama_s_form"],
    ),
    Sabotage(
        "ollama-fields-passed-on",
        "a field that Ollama does not have takes effect as that of a chat",
        _pass_unknown_fields_on,
        [WRONG + "test_unknown_fields_are_reported_by_their_own_names[/api/chat]"],
    ),
    Sabotage(
        "ollama-resumed",
        "a Last-Event-ID of a chat cuts the answer of Ollama's API",
        _take_part_in_resuming,
        [CLIENT + "test_a_client_cannot_enter_the_stream_of_another_form"],
    ),
    Sabotage(
        "ollama-options-ignored",
        "options that cannot be supported are ignored in silence",
        _accept_every_option,
        [WRONG + "test_a_wrong_field_is_named[/api/chat-{'options': {'mirostat': 1}}-options.mirostat]"],
    ),
    Sabotage(
        "ollama-results-lost",
        "results of tools do not reach the prompt",
        _lose_messages,
        [CLIENT + "test_calls_are_whole_objects_and_their_results_reach_the_prompt"],
    ),
]
