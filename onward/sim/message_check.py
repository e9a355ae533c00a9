"""Checks what a client of `/v1/messages` receives against the oracle: the tokens of its cursors, the order of the
events, and the message that they build."""

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from onward.proto.cursor import Cursor
from onward.proto.finish_reasons import ABORT, PD_RESCHEDULE
from onward.sim.completion_check import CompletionChecker, ReceivedChoice
from onward.sim.oracle import STRUCTURES, decode_text
from onward.sim.reply_check import InvariantError
from onward.sim.scenario import SimRequest, common_fields

PATH = "/v1/messages"
_NEXT: dict[str, tuple[str, ...]] = {
    "": ("message_start",),
    "message_start": ("ping",),
    "ping": ("content_block_start", "message_delta"),
    "content_block_start": ("content_block_delta", "content_block_stop"),
    "content_block_delta": ("content_block_delta", "content_block_stop"),
    "content_block_stop": ("message_delta",),
    "message_delta": ("message_stop",),
    "message_stop": (),
}
"""The events that may follow each event. The simulated model writes text only, which is one block."""
_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}


def body_of(request: SimRequest, history: list[dict[str, str]]) -> dict[str, Any]:
    fields = {name: value for name, value in common_fields(request).items() if name not in ("stop", "user")}
    optional = {
        **fields,
        "stop_sequences": request.stop or None,
        "metadata": {"user_id": request.session} if request.session else None,
        "output_config": _output_config(request.structure) if request.structure else None,
    }
    body = {
        "model": "hash",
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "stream": request.is_streaming,
        "messages": history,
    }
    return body | {name: value for name, value in optional.items() if value is not None}


def _output_config(structure: str) -> dict[str, Any]:
    schema = STRUCTURES[structure].fields["response_format"]["json_schema"]["schema"]
    return {"format": {"type": "json_schema", "schema": schema}}


@dataclass(frozen=True, slots=True)
class _EventState:
    """What has been received up to an event."""

    last_event: str = ""
    choice: ReceivedChoice = field(default_factory=ReceivedChoice)
    usage: dict[str, Any] | None = None
    resume: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _MessageEvents:
    now: _EventState = field(default_factory=_EventState)
    at_cursor: _EventState = field(default_factory=_EventState)
    """The state at the last event with a cursor. Later events are sent again after a resume."""


class MessageChecker(CompletionChecker):
    """Converts the events of a message to completion chunks, and checks these as `CompletionChecker` does."""

    def __init__(self, request: SimRequest, prompt: list[int]) -> None:
        super().__init__(request, prompt)
        self._events = _MessageEvents()

    def restart(self) -> None:
        super().restart()
        self._events = _MessageEvents()

    def resume_at_cursor(self) -> None:
        # Events after the last cursor, such as those of an end that was cut off, are sent again.
        state = self._events.now = self._events.at_cursor
        self.choices[0] = replace(state.choice, token_ids=self.choices[0].token_ids)
        self.usage, self.resume = state.usage, state.resume

    def continue_as_new_request(self) -> None:
        """Discards the text and events of the given-up request: the new message has all of the content from its
        beginning."""
        self.choices[0].text = ""
        super().continue_as_new_request()
        self._events = _MessageEvents()

    def take_event(self, event_id: str | None, data: dict[str, Any]) -> None:
        kind, last = data["type"], self._events.now.last_event
        if kind not in _NEXT[last]:
            raise InvariantError(2, f"the event {kind} follows {last or 'nothing'}")
        self._events.now = replace(self._events.now, last_event=kind)
        super().take_event(event_id, self._chunk(data))
        choice = replace(self.choices[0])
        self._events.now = replace(self._events.now, choice=choice, usage=self.usage, resume=self.resume)
        if event_id is not None:
            self._events.at_cursor = self._events.now

    def _take_cursor(self, cursor: Cursor) -> None:
        """Takes a cursor. Tokens without an event of their own are not listed in any cursor; only the position of the
        next cursor counts them."""
        self._fix_seed(cursor.seed)
        [choice], [expected], new = self.choices, self.expected, cursor.new_tokens.get(0, [])
        num_silent = cursor.choices[0].position - len(new) - len(choice.token_ids)
        if num_silent > 0:
            num_known = len(choice.token_ids)
            choice.token_ids += expected.token_ids[num_known : num_known + num_silent]
            self.num_tokens += num_silent
        super()._take_cursor(cursor)

    @staticmethod
    def _may_be_cut_behind(sent: list[int], token_ids: list[int]) -> bool:
        """Returns whether these are the sent tokens, and possibly more: tokens without text yet have no event before an
        error. The check of the text notices a token whose text is missing."""
        return token_ids[: len(sent)] == sent

    def _check_id(self, data: dict[str, Any]) -> None:
        """Does nothing, because only the first event has the id; `_chunk` checks it."""

    def _chunk(self, data: dict[str, Any]) -> dict[str, Any]:
        """Returns the event as a chunk of a completion."""
        choice: dict[str, Any] = {"index": 0}
        chunk: dict[str, Any] = {"choices": [choice]}
        match data["type"]:
            case "message_start":
                if self.answer_id not in (None, data["message"]["id"]):
                    raise InvariantError(2, f"the message {self.answer_id} is sent as {data['message']['id']}")
                self.answer_id = data["message"]["id"]
            case "content_block_start" | "content_block_delta" | "content_block_stop" if data["index"] != 0:
                raise InvariantError(2, f"a block {data['index']} of a message that has one")
            case "content_block_delta":
                choice["text"] = data["delta"]["text"]
            case "message_delta":
                choice |= self._end_of(data["delta"], data)
                chunk |= {"usage": _usage(data["usage"]), "resume": data.get("resume", {})}
            case _:
                pass
        return chunk

    def _end_of(self, stop: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields of a completion that show how a choice has ended. Checks the stop sequence."""
        reason, sequence = stop["stop_reason"], stop["stop_sequence"]
        if (reason == "stop_sequence") != (sequence is not None):
            raise InvariantError(2, f"the stop sequence is {sequence!r}, and the reason {reason}")
        if reason is None:
            finish_reason = PD_RESCHEDULE if "error" in fields else ABORT
        else:
            finish_reason = _REASONS[reason]
            self._check_stop_sequence(sequence)
        ids = {name: fields[name] for name in ("completion_token_ids", "num_text_tokens") if name in fields}
        return {"finish_reason": finish_reason, **ids}

    def _check_stop_sequence(self, sequence: str | None) -> None:
        if self._expected is None:
            return
        [expected] = self.expected
        rest = decode_text(expected.token_ids)[len(expected.text) :]
        ends_by_string = any(rest.startswith(stop) for stop in self.request.stop) and expected.finish_reason == "stop"
        is_right = sequence in self.request.stop and rest.startswith(sequence) if sequence else not ends_by_string
        if not is_right:
            raise InvariantError(2, f"the stop sequence is {sequence!r}, and behind the text comes {rest!r}")

    def take_whole(self, body: bytes) -> None:
        self._take_whole(self._completion(msgspec.json.decode(body)))

    def check_partial(self, partial: dict[str, Any]) -> None:
        if "content" in partial:
            partial = self._completion(partial)
        elif "completion_token_ids" in partial:
            partial = partial | {"choices": [{"index": 0, **partial}]}
        super().check_partial(partial)

    def _completion(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns a complete message as a completion."""
        text = "".join(block["text"] for block in message["content"])
        is_cut = message["stop_reason"] is None and "completion_token_ids" in message
        stop = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        end = self._end_of(stop, message) if message["stop_reason"] is not None or is_cut else {"finish_reason": None}
        return {
            "choices": [{"index": 0, "text": text, **end}],
            "usage": _usage(message["usage"]),
            "resume": message.get("resume", {}),
        }


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    num_prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return {"prompt_tokens": num_prompt_tokens, "completion_tokens": usage["output_tokens"]}
