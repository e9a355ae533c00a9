"""Deliberate bugs in what is returned: by an aborted or failed request, of token ids, of echoed prompts."""

from typing import Any

from onward.api.endpoints import chat, close_attempt, completions
from onward.api.engine_link import request_tracker
from onward.api.lifecycle.stream_formatters import BodyCollector, ChunkFormatter
from onward.api.requests.text_processor import TextProcessor
from onward.proto.finish_reasons import PD_RESCHEDULE
from onward.router.client_stream import ClientStream
from onward.router.partial_output import PartialOutputWriter
from onward.text.message_parser import MessageParser
from onward.text.text_stream import TextStream
from onward.web import sse
from tests.sabotage.patches import Patches, Sabotage

PARTIAL = "tests/api/test_partial.py::"
CLOSING = "tests/router/test_partial_output.py::"
CHAT = "/v1/chat/completions"


def _an_abort_is_an_error(patch: Patches) -> None:
    patch.put(request_tracker, "INCOMPLETE_REASONS", frozenset({PD_RESCHEDULE}))


def _an_error_drops_the_answer(patch: Patches) -> None:
    patch.put(BodyCollector, "partial_body", lambda self, info: None)


def _an_error_event_drops_the_tokens(patch: Patches) -> None:
    patch.put(ChunkFormatter, "format_error", lambda self, info: [sse.error_event(info)])


def _every_token_is_covered(patch: Patches) -> None:
    patch.put(TextStream, "num_emitted_tokens", lambda self, token_ids, num_hidden=0: len(token_ids))


def _held_tags_are_covered(patch: Patches) -> None:
    patch.put(MessageParser, "num_held", 0)


def _a_router_asks_nobody(patch: Patches) -> None:
    async def closed(self: PartialOutputWriter, info: Any) -> None:
        return None

    patch.put(PartialOutputWriter, "_render_end", closed)


def _a_router_keeps_what_an_instance_has_aborted(patch: Patches) -> None:
    patch.put(ClientStream, "was_aborted", False)


def _an_abort_discards_a_whole_answer(patch: Patches) -> None:
    patch.put(ClientStream, "is_out_of_reach_of_aborts", False)


def _an_answer_without_its_logprobs_is_complete(patch: Patches) -> None:
    patch.put(close_attempt, "_seems_complete", lambda job: False)


def _the_adapter_is_for_generate_only(patch: Patches) -> None:
    for module in (chat, completions):
        patch.put(module, "shown_token_ids", lambda piece, hides_end: piece.token_ids)


def _echo_drops_special_tokens(patch: Patches) -> None:
    patch.around(TextProcessor, "decode", lambda text_of, self, token_ids, with_special=False: text_of(self, token_ids))


TABLE = [
    Sabotage(
        "abort-is-an-error",
        "an aborted request is answered by an error, and what it had is lost",
        _an_abort_is_an_error,
        [PARTIAL + f"test_a_request_that_is_aborted_before_its_first_token_returns_empty_text[whole-{CHAT}]"],
    ),
    Sabotage(
        "error-without-partial",
        "a request that fails loses the text and tokens that it had",
        _an_error_drops_the_answer,
        [PARTIAL + f"test_a_failed_request_returns_what_it_has_next_to_the_error[deadline-whole-{CHAT}]"],
    ),
    Sabotage(
        "error-event-without-partial",
        "a stream that fails does not say how to continue it",
        _an_error_event_drops_the_tokens,
        [PARTIAL + f"test_a_failed_request_returns_what_it_has_next_to_the_error[crashed-streamed-{CHAT}]"],
    ),
    Sabotage(
        "half-characters-covered",
        "tokens count as covered by a text that does not show all of theirs",
        _every_token_is_covered,
        ["tests/text/test_text_stream.py::test_half_a_character_and_the_beginning_of_a_stop_string_are_not_covered"],
    ),
    Sabotage(
        "held-tags-covered",
        "tokens of what may become a call count as covered by the text",
        _held_tags_are_covered,
        ["tests/text/test_message_text.py::test_tokens_of_what_may_become_a_call_or_a_tag_are_not_covered"],
    ),
    Sabotage(
        "router-ends-without-text",
        "a router that gives a request up has no instance write what there is of it",
        _a_router_asks_nobody,
        [CLOSING + "test_an_aborted_request_ends_as_an_instance_writes_it[2-whole]"],
    ),
    Sabotage(
        "router-keeps-aborted",
        "a router keeps a stream that was aborted at its instance",
        _a_router_keeps_what_an_instance_has_aborted,
        [CLOSING + "test_a_stream_that_was_aborted_at_its_instance_is_not_kept[abort-0]"],
    ),
    Sabotage(
        "abort-discards-answer",
        "an abort after the last token discards the whole answer with its logprobs",
        _an_abort_discards_a_whole_answer,
        [
            CLOSING + "test_an_abort_after_the_last_token_waits_for_the_whole_answer",
            "tests/router/test_core.py::test_a_whole_answer_that_came_before_an_abort_is_told[stop-True]",
        ],
    ),
    Sabotage(
        "complete-without-logprobs",
        "an answer that lacks the logprobs it was asked for is written as complete",
        _an_answer_without_its_logprobs_is_complete,
        [PARTIAL + f"test_an_answer_that_lacks_the_logprobs_it_was_asked_for_is_not_written_as_complete[{CHAT}]"],
    ),
    Sabotage(
        "adapter-for-generate-only",
        "the internal adapter shows the end token in return_token_ids",
        _the_adapter_is_for_generate_only,
        ["tests/api/test_generate.py::test_the_adapter_holds_for_returned_token_ids_too"],
    ),
    Sabotage(
        "echo-drops-special",
        "echo leaves special tokens of a token prompt out",
        _echo_drops_special_tokens,
        ["tests/api/test_client_fields.py::test_echo_keeps_special_tokens_of_token_prompts_and_of_strings"],
    ),
]
