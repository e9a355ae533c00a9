"""Checks what a client of `/v1/responses` receives against the oracle.

Each event comes in order and is the same each time, whichever process sends it and from whichever number on. At the end
there is one response, which does not change any more.
"""

from typing import Any

import msgspec

from onward.sim.oracle import STRUCTURES, expected_choice, shown_text
from onward.sim.reply_check import InvariantError, ReplyChecker
from onward.sim.scenario import SimRequest, common_fields

PATH = "/v1/responses"
SCHEMAS = tuple(name for name, structure in STRUCTURES.items() if "response_format" in structure.fields)
"""Names of the structured outputs that a response can have."""
_OVER = ("completed", "incomplete", "failed", "cancelled")
_DELTA = "response.output_text.delta"


class ConflictingEndError(InvariantError):
    """A response that had ended is shown as unfinished or with another end. This may happen only if the record of the
    first end was lost."""


def body_of(request: SimRequest) -> dict[str, Any]:
    optional = {
        **common_fields(request),
        "background": request.background or None,
        "text": _format(request.structure) if request.structure else None,
    }
    if request.logprobs is not None:
        optional |= {"include": ["message.output_text.logprobs"], "top_logprobs": request.logprobs}
    body = {
        "model": request.model,
        "input": request.prompt,
        "max_output_tokens": request.max_tokens,
        "temperature": request.temperature,
        "stream": request.is_streaming,
    }
    return body | {name: value for name, value in optional.items() if value is not None}


def _format(structure: str) -> dict[str, Any]:
    return {"format": {"type": "json_schema", **STRUCTURES[structure].fields["response_format"]["json_schema"]}}


class ResponseChecker(ReplyChecker):
    """Collects and checks a response over all connections of its client."""

    def __init__(self, request: SimRequest, prompt: list[int]) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []
        """All received events, each once."""
        self.final: dict[str, Any] | None = None
        """The response, once it has ended."""
        self.was_cancelled = False
        """A server has replied that it has cancelled the response."""
        self.lost_events = False
        """The response was ended at a position before events that the client had received."""
        self._request, self._num_prompt = request, len(prompt)
        self._expected = expected_choice(request, prompt, request.seed or 0, 0)
        self._next = self._num_at_cursor = 0
        self._text, self._logprobs = "", list[float]()

    @property
    def is_finished(self) -> bool:
        return self.final is not None

    @property
    def text(self) -> str:
        return self._text

    @property
    def outcome(self) -> str:
        return "cancelled" if self._final["status"] == "cancelled" else "complete"

    @property
    def error(self) -> dict[str, Any] | None:
        """The error of a failed response, or None."""
        return None if self.final is None else self.final["error"]

    @property
    def _final(self) -> dict[str, Any]:
        if self.final is None:
            raise InvariantError(1, "a response without an end")
        return self.final

    def restart(self) -> None:
        """Discards what was received, because the request is sent again. This makes another response with another
        id."""
        super().restart()
        self.response_id, self.cursor, self.final = "", "", None
        self.was_cancelled = self.lost_events = False
        self.events, self._text, self._logprobs = [], "", []
        self._next = self._num_at_cursor = 0

    def go_on_behind(self, number: int) -> None:
        """Expects the events after this number next, because the client asks for them; -1 means all events."""
        self._next = number + 1

    def go_on_from_cursor(self) -> None:
        """Expects the events after the last one with a cursor next, because the client resumes there and they are sent
        again."""
        self._next = self._num_at_cursor

    # Events.

    def take_event(self, event_id: str | None, data: dict[str, Any]) -> None:
        number, event = data["sequence_number"], _without_cache_figures(data)
        if number != self._next:
            raise InvariantError(3, f"event {number} is told in the place of {self._next}")
        self._next += 1
        if number < len(self.events) and self.final is None and _is_cancelled_or_failed(event):
            # Its tokens were lost with their process, and it was ended before all of them were generated again.
            self.lost_events = True
            del self.events[number:]
        if number < len(self.events):
            if event != (before := self.events[number]):
                is_other_end = _is_cancelled_or_failed(before) or _is_cancelled_or_failed(event)
                raise _error(2, f"event {number} was {before}, and is told again as {event}", is_other_end)
        elif self.events and _ends(self.events[-1]):
            raise _error(1, f"{event} follows the end", _is_cancelled_or_failed(self.events[-1]))
        else:
            self._take_new(event)
        if event_id is not None:
            self.cursor, self._num_at_cursor = event_id, self._next

    def _take_new(self, event: dict[str, Any]) -> None:
        if "response" in event:
            self._check_id(event["response"])
            if _ends(event):
                # Raises if the response has ended in another way. The event is then not added to `events`.
                self._end(event["response"])
        self.events.append(event)
        if event["type"] == _DELTA:
            self._text += event["delta"]
            self._logprobs += [entry["logprob"] for entry in event["logprobs"]]
            self._check_text(self._text)
            self._check_logprobs(self._logprobs)

    def check_partial(self, partial: dict[str, Any]) -> None:
        self._check_text(_text_of(partial))

    # The response itself.

    def take_whole(self, body: bytes) -> None:
        self.take_shown(msgspec.json.decode(body))

    def take_shown(self, response: dict[str, Any]) -> None:
        """Takes the present state of the response, retrieved by its id."""
        response = _without_cache_figures(response)
        self._check_id(response)
        self._check_text(_text_of(response))
        is_abandoned = response["status"] == "incomplete" and response["usage"] is None
        if response["status"] in _OVER and not is_abandoned:
            self._end(response)
        elif self.final is not None:
            raise ConflictingEndError(1, f"it was {self.final['status']}, and is {response['status']} now")

    def _check_id(self, response: dict[str, Any]) -> None:
        if self.response_id and self.response_id != response["id"]:
            raise InvariantError(2, f"{self.response_id} is told as {response['id']}")
        self.response_id = response["id"]

    def _end(self, response: dict[str, Any]) -> None:
        if self.final is None:
            self.final = response
        elif self.final != response:
            is_other_end = bool({"cancelled", "failed"} & {self.final["status"], response["status"]})
            raise _error(2, f"it had ended as {self.final}, and has as {response} now", is_other_end)

    # The expected response.

    def check_end(self) -> None:
        final, expected = self._final, self._expected
        self.num_tokens = final["usage"]["output_tokens"]
        if final["status"] == "cancelled":
            if self._request.cancel_at_s is None and self._request.abort_at_s is None:
                raise InvariantError(1, "it was cancelled without a request to cancel it")
            self._check_cut()
            return
        is_cut = expected.finish_reason == "length"
        wanted = {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": (self._num_prompt, len(expected.token_ids)),
            "text": expected.text,
        }
        usage = final["usage"]
        reported = {name: final[name] for name in ("status", "incomplete_details")}
        reported |= {"usage": (usage["input_tokens"], usage["output_tokens"]), "text": _text_of(final)}
        if reported != wanted:
            raise InvariantError(2, f"the response ends as {reported} instead of {wanted}")
        self._check_events(wanted["status"])

    def _check_cut(self) -> None:
        """Checks a cancelled response: all tokens have their text, no character is incomplete, and there is one end."""
        text, num_tokens = _text_of(self._final), self.num_tokens
        if num_tokens > len(self._expected.token_ids):
            raise InvariantError(2, f"it was cancelled behind {num_tokens} tokens of {len(self._expected.token_ids)}")
        shown = shown_text(self._expected.token_ids[:num_tokens], self._request)
        if text not in shown and text.strip() + shown[0].strip():
            raise InvariantError(
                2, f"it was cancelled behind {num_tokens} tokens and reads {text!r} instead of {shown[0]!r}"
            )
        if not self.events or not _ends(self.events[-1]) or self.lost_events:
            return
        types, deltas = self._event_types()
        item = ["output_item.added", "content_part.added", *deltas] if deltas else []
        if types != ["created", "in_progress", *item, "incomplete"]:
            raise InvariantError(2, f"the events of a cancelled response are {types}")
        if self._text != text:
            raise InvariantError(2, f"the events read {self._text!r}, and the cancelled response {text!r}")

    def _check_events(self, status: str) -> None:
        """Checks the types and the text of the events, if the client has received all of them."""
        if not self.events or not _ends(self.events[-1]):
            return
        types, deltas = self._event_types()
        opening = ["created", "in_progress", "output_item.added", "content_part.added"]
        closing = ["output_text.done", "content_part.done", "output_item.done", status]
        if types != opening + deltas + closing:
            raise InvariantError(2, f"the events are {types}")
        if self._text != self._expected.text:
            raise InvariantError(2, f"the events read {self._text!r} instead of {self._expected.text!r}")

    def _event_types(self) -> tuple[list[str], list[str]]:
        """Returns the types of all received events, and of the text deltas among them."""
        types = [event["type"].removeprefix("response.") for event in self.events]
        return types, ["output_text.delta"] * types.count("output_text.delta")

    def _check_text(self, text: str) -> None:
        if not self._expected.text.startswith(text):
            raise InvariantError(2, f"it reads {text!r} instead of {self._expected.text!r}")

    def _check_logprobs(self, logprobs: list[float]) -> None:
        """Checks that the logprobs are the first of the expected ones. Tokens without text have none."""
        wanted = [-token / 8 for token in self._expected.token_ids] if self._request.logprobs is not None else []
        if logprobs != wanted[: len(logprobs)]:
            raise InvariantError(2, f"the logprobs are {logprobs} instead of {wanted}")


def _error(invariant: int, what: str, is_other_end: bool) -> InvariantError:
    return (ConflictingEndError if is_other_end else InvariantError)(invariant, what)


def _ends(event: dict[str, Any]) -> bool:
    return event["type"].removeprefix("response.") in _OVER


def _is_cancelled_or_failed(event: dict[str, Any]) -> bool:
    return "response" in event and event["response"]["status"] in ("cancelled", "failed")


def _text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def _without_cache_figures(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the data without the number of cached tokens and the time of completion. Both may differ if a lost response
    was computed again."""
    if "response" in data:
        return data | {"response": _without_cache_figures(data["response"])}
    data = {name: value for name, value in data.items() if name != "completed_at"}
    if data.get("usage") is None:
        return data
    usage = {name: value for name, value in data["usage"].items() if name != "input_tokens_details"}
    return data | {"usage": usage}
