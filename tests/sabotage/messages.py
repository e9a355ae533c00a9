"""Deliberate bugs in the Messages API: its events, errors and requests."""

from collections.abc import Callable
from typing import Any

from onward.api import app as api_app
from onward.api.lifecycle.event_group_formatter import EventGroupFormatter
from onward.api.lifecycle.per_token_text_stream import PerTokenTextStream
from onward.api.messages import block_events, message_event_builder
from onward.api.messages import chat_request as message_chat_request
from onward.api.messages.block_events import MessageBlockEvents
from onward.router.client_writer import ClientWriter
from onward.router.endpoints.messages import MessageEventWriter
from onward.web import sse
from onward.web.anthropic_api import content_blocks
from onward.web.auth.authenticator import Authenticator
from tests.sabotage.patches import Patches, Sabotage

CUTS = "tests/api/messages/test_cuts.py::"
CLIENT = "tests/api/messages/test_client.py::"
WRONG = "tests/api/messages/test_bad_input.py::"
ROUTED = "tests/api/messages/test_behind_router.py::"


def _forget_the_open_block(patch: Patches) -> None:
    def opening(original: Callable, self: EventGroupFormatter) -> list[bytes]:
        events = original(self)
        self._event_builder._items._open = None  # type: ignore[attr-defined]
        return events

    patch.around(EventGroupFormatter, "format_opening", opening)


def _tell_nothing_of_given_tokens(patch: Patches) -> None:
    patch.put(EventGroupFormatter, "_held_events", lambda self, events: [])


def _show_omitted_thinking(patch: Patches) -> None:
    def make(original: Callable, self: MessageBlockEvents, *, shows_thinking: bool) -> None:
        original(self, shows_thinking=True)

    patch.around(MessageBlockEvents, "__init__", make)


def _name_no_unseen_blocks(patch: Patches) -> None:
    patch.put(message_chat_request, "ignored_blocks", lambda messages: ())


def _leave_errors_in_openai_s_form(patch: Patches) -> None:
    patch.put(api_app, "with_message_errors", lambda scope, send: send)


def _leave_routed_errors_in_openai_s_form(patch: Patches) -> None:
    patch.put(MessageEventWriter, "error_event", ClientWriter.error_event)


def _end_with_a_mark(patch: Patches) -> None:
    patch.put(MessageEventWriter, "end_marker", sse.DONE)


def _ignore_x_api_key(patch: Patches) -> None:
    def caller(original: Callable, self: Authenticator, scope: Any) -> Any:
        headers = [(name, value) for name, value in scope["headers"] if name != b"x-api-key"]
        return original(self, {**scope, "headers": headers})

    patch.around(Authenticator, "_caller", caller)


def _name_no_stop_sequence(patch: Patches) -> None:
    patch.put(PerTokenTextStream, "stop_string", None)


def _count_cached_tokens_twice(patch: Patches) -> None:
    def usage(original: Callable, usage: Any) -> dict[str, Any]:
        return original(usage) | {"input_tokens": usage.prompt_tokens}

    patch.around(message_event_builder, "usage_json", usage)


def _sign_nothing(patch: Patches) -> None:
    patch.put(block_events, "signature", lambda thinking: "")


def _drop_images(patch: Patches) -> None:
    def without_images(original: Callable, content: Any, path: str) -> Any:
        blocks = original(content, path)
        return [block for block in blocks if block.get("type") != "image"]

    patch.around(content_blocks, "_blocks", without_images)


TABLE = [
    Sabotage(
        "message-block-opened-again",
        "a resumed message does not know which content block is open",
        _forget_the_open_block,
        [CUTS + "test_a_client_resumes_by_its_last_event_id[words]"],
    ),
    Sabotage(
        "message-without-given-tokens",
        "a message lacks what the tokens say that its client has sent",
        _tell_nothing_of_given_tokens,
        [CUTS + "test_tokens_of_an_earlier_answer_are_returned_with_what_follows_them[words]"],
    ),
    Sabotage(
        "message-errors-of-openai",
        "errors of the Messages API have OpenAI's form",
        _leave_errors_in_openai_s_form,
        [WRONG + "test_every_refusal_has_anthropic_s_form"],
    ),
    Sabotage(
        "routed-message-errors-of-openai",
        "an error in a routed stream of the Messages API has OpenAI's form",
        _leave_routed_errors_in_openai_s_form,
        [ROUTED + "test_when_no_instance_is_left_the_stream_ends_with_the_error"],
    ),
    Sabotage(
        "message-ends-with-done",
        "a routed message ends with data: [DONE], which is no JSON",
        _end_with_a_mark,
        [ROUTED + "test_a_routed_message_equals_a_direct_one[words]"],
    ),
    Sabotage(
        "x-api-key-ignored",
        "a key in the x-api-key header does not count",
        _ignore_x_api_key,
        ["tests/web/test_authenticator.py::test_a_key_may_come_as_x_api_key_too"],
    ),
    Sabotage(
        "stop-sequence-unnamed",
        "a message does not say which stop sequence ended it",
        _name_no_stop_sequence,
        [CLIENT + "test_the_stop_sequence_is_named"],
    ),
    Sabotage(
        "cached-tokens-twice",
        "input_tokens of a message counts cached tokens too",
        _count_cached_tokens_twice,
        [CLIENT + "test_a_message_is_created"],
    ),
    Sabotage(
        "thinking-unsigned",
        "thinking blocks have an empty signature, so clients drop them",
        _sign_nothing,
        [CLIENT + "test_the_stream_helper_builds_the_same_message"],
    ),
    Sabotage(
        "images-dropped",
        "image blocks of a message are dropped in silence",
        _drop_images,
        [WRONG + "test_a_block_that_is_no_text_is_named_by_its_type"],
    ),
    Sabotage(
        "omitted-thinking-shown",
        "thinking blocks have their text although the request omits it",
        _show_omitted_thinking,
        [CLIENT + "test_thinking_can_be_left_out_and_its_block_sent_back"],
    ),
    Sabotage(
        "unseen-blocks-unnamed",
        "images in results of tools are replaced by a note, and no header says so",
        _name_no_unseen_blocks,
        [WRONG + "test_tools_and_blocks_that_the_model_does_not_see_are_named"],
    ),
]
