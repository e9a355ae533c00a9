"""Checks what a client receives against the oracle, event by event: each token once, in order, and one end."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from onward.proto.cursor import Cursor, parse_cursor
from onward.proto.finish_reasons import ABORT, INCOMPLETE_REASONS, PD_RESCHEDULE
from onward.sim.oracle import ExpectedChoice, decode_text, expected_choice
from onward.sim.reply_check import InvariantError, ReplyChecker
from onward.sim.scenario import SimRequest


@dataclass(slots=True)
class ReceivedChoice:
    """What the client has received of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    all_token_ids: list[int] | None = None
    """`completion_token_ids` of an incomplete response."""
    num_text_tokens: int | None = None
    """How many of these tokens the text covers, as the server reports it."""


class CompletionChecker(ReplyChecker):
    """Collects and checks the response to one request over all tries of its client."""

    def __init__(self, request: SimRequest, prompt: list[int]) -> None:
        super().__init__()
        self.request = request
        self.choices = [ReceivedChoice() for _ in range(request.n)]
        self._base = copy.deepcopy(self.choices)
        """The choices from which a request that is sent again starts."""
        self.answer_id: str | None = None
        self.usage: dict[str, Any] | None = None
        self._prompt = prompt
        self._expected: list[ExpectedChoice] | None = None
        self._roles = 0
        self._seed: int | None = None
        self.model = self._only_version
        """The model that answers, once it is known."""
        if request.seed is not None or not request.temperature:
            self._fix_seed(request.seed or 0)

    @property
    def is_finished(self) -> bool:
        """Returns whether all choices have ended. If the request was aborted, a choice that was given up before has
        ended too."""
        unfinished = (None,) if self._was_aborted else (None, PD_RESCHEDULE)
        return all(choice.finish_reason not in unfinished for choice in self.choices)

    @property
    def was_given_up(self) -> bool:
        return not self._was_aborted and any(choice.finish_reason == PD_RESCHEDULE for choice in self.choices)

    @property
    def _was_aborted(self) -> bool:
        return any(choice.finish_reason == ABORT for choice in self.choices)

    @property
    def outcome(self) -> str:
        return "aborted" if self._was_aborted else "complete"

    @property
    def text(self) -> str:
        return self.choices[0].text

    def resume_fields(self) -> dict[str, Any]:
        token_ids = [choice.token_ids for choice in self.choices]
        reasons = [None if entry.finish_reason in INCOMPLETE_REASONS else entry.finish_reason for entry in self.choices]
        return {
            "seed": parse_cursor(self.cursor).seed,
            "generated_token_ids": token_ids[0] if len(token_ids) == 1 else token_ids,
            "generated_finish_reasons": reasons,
            "model": self.model or self.request.model,
        }

    def restart(self) -> None:
        """Discards events that came without a cursor, because the request is sent again from its beginning."""
        assert not self.cursor, "what has a place is continued"
        self.choices = copy.deepcopy(self._base)
        self.answer_id, self.usage, self._roles = None, None, 0
        if self._only_version is None:
            self.model = self._expected = None

    def continue_as_new_request(self) -> None:
        """Continues a request that was given up as a new one. The new response repeats the finish reasons of choices
        that had ended before."""
        for choice in self.choices:
            choice.finish_reason = None
        self.cursor = ""
        self._base = copy.deepcopy(self.choices)

    # A stream's events.

    def take_event(self, event_id: str | None, data: dict[str, Any]) -> None:
        self._check_id(data)
        if event_id is not None:
            self._take_cursor(parse_cursor(event_id))
            self.cursor = event_id
        if data.get("usage") is not None:
            if self.usage is not None:
                raise InvariantError(2, "a second usage")
            self.usage = data["usage"]
        for choice_data in data.get("choices", []):
            self._take_choice_delta(choice_data)
        self.resume = data.get("resume", self.resume)
        self._check_texts()

    def _check_id(self, data: dict[str, Any]) -> None:
        self._check_model(data["model"])
        identity = (data["id"], data["created"])
        if self.answer_id is None:
            self.answer_id = repr(identity)
        elif self.answer_id != repr(identity):
            raise InvariantError(2, f"the stream's id and time change from {self.answer_id} to {identity}")

    def _check_model(self, model: str) -> None:
        """Checks that the model is the one of the first event, over all connections and attempts."""
        if model not in self.request.versions:
            raise InvariantError(2, f"the model {model!r} answers, and not one of {self.request.versions}")
        if self.model is None:
            self.model = model
            self._expect()
        elif self.model != model:
            raise InvariantError(2, f"the stream goes from the model {self.model!r} to {model!r}")

    def _take_cursor(self, cursor: Cursor) -> None:
        self._fix_seed(cursor.seed)
        for index, new in cursor.new_tokens.items():
            choice, expected = self.choices[index], self.expected[index]
            position = cursor.choices[index].position
            if position - len(new) != len(choice.token_ids):
                kind = "again" if position - len(new) < len(choice.token_ids) else "skipped"
                raise InvariantError(
                    3, f"choice {index} is told {new} up to {position} behind {len(choice.token_ids)}: {kind}"
                )
            choice.token_ids += new
            self.num_tokens += len(new)
            if choice.token_ids != expected.token_ids[: len(choice.token_ids)]:
                raise InvariantError(2, f"choice {index} gets {choice.token_ids} instead of {expected.token_ids}")
        for choice, choice_cursor in zip(self.choices, cursor.choices, strict=True):
            if choice_cursor.position != len(choice.token_ids):
                raise InvariantError(
                    3, f"the cursor says {choice_cursor.position}, and {len(choice.token_ids)} tokens have come"
                )

    def _take_choice_delta(self, data: dict[str, Any]) -> None:
        choice = self.choices[data["index"]]
        delta = data.get("delta", data)
        if "role" in delta:
            self._roles += 1
            if self._roles > self.request.n:
                raise InvariantError(2, "a role is told again")
        choice.text += delta.get("text") or delta.get("content") or ""
        choice.logprobs += _logprobs(data.get("logprobs"))
        if data.get("finish_reason") is not None:
            if choice.finish_reason is not None:
                raise InvariantError(1, f"choice {data['index']} ends twice")
            choice.finish_reason = data["finish_reason"]
        _take_ids(choice, data)

    # A complete response.

    def take_whole(self, body: bytes) -> None:
        self._take_whole(msgspec.json.decode(body))

    def _take_whole(self, data: dict[str, Any]) -> None:
        if "model" in data:
            self._check_model(data["model"])
        for choice_data in data["choices"]:
            choice = self.choices[choice_data["index"]]
            message = choice_data.get("message", choice_data)
            choice.text += message.get("text") or message.get("content") or ""
            choice.logprobs += _logprobs(choice_data.get("logprobs"))
            choice.finish_reason = choice_data["finish_reason"]
            choice.token_ids += choice_data.get("token_ids", [])
            _take_ids(choice, choice_data)
        self.usage, self.resume = data["usage"], data.get("resume", {})
        if "seed" in self.resume:
            self._fix_seed(self.resume["seed"])
        for index, choice in enumerate(self.choices):
            if choice.finish_reason in INCOMPLETE_REASONS:
                self._check_incomplete(index, choice)

    # The partial output of a failed request.

    def check_partial(self, partial: dict[str, Any]) -> None:
        """Checks that the partial output and the tokens to continue from are prefixes of the expected output."""
        resume = partial.get("resume")
        if resume is not None:
            self._fix_seed(resume["seed"])
        if self._expected is None:
            return  # the client does not know the seed or the model
        listed = partial.get("choices", [])
        if not self.request.is_streaming and listed:
            partial_checker = copy.deepcopy(self)
            partial_checker.choices = copy.deepcopy(self._base)
            partial_checker._take_whole(partial)
            for index, choice in enumerate(partial_checker.choices):
                partial_checker._check_incomplete(index, choice)
        for choice_data in listed if self.request.is_streaming else []:
            choice = copy.deepcopy(self.choices[choice_data["index"]])
            _take_ids(choice, choice_data)
            self._check_incomplete(choice_data["index"], choice)
        if resume is not None:
            generated = resume["generated_token_ids"]
            for expected, token_ids in zip(
                self.expected, [generated] if self.request.n == 1 else generated, strict=True
            ):
                if token_ids != expected.token_ids[: len(token_ids)]:
                    raise InvariantError(2, f"it is to be continued from {token_ids} instead of {expected.token_ids}")

    def _check_incomplete(self, index: int, choice: ReceivedChoice) -> None:
        """Checks a choice that is incomplete, or was incomplete when another one failed. Its tokens are a prefix of the
        expected ones. Its text has all tokens that the server reports as covered, and nothing beyond its tokens."""
        token_ids, num_covered = choice.all_token_ids, choice.num_text_tokens
        if token_ids is None:
            raise InvariantError(2, f"choice {index} was cut, and its tokens are not told")
        if self._expected is None:
            return
        expected = self.expected[index]
        if token_ids != expected.token_ids[: len(token_ids)]:
            raise InvariantError(2, f"choice {index} is cut behind {token_ids} instead of {expected.token_ids}")
        if self.request.is_streaming and not self._may_be_cut_behind(choice.token_ids, token_ids):
            raise InvariantError(3, f"choice {index} has told {choice.token_ids}, and is cut behind {token_ids}")
        if self._speaks_tokens:
            return
        if num_covered is None or not 0 <= num_covered <= len(token_ids):
            raise InvariantError(2, f"the text of choice {index} covers {num_covered} of {len(token_ids)} tokens")
        covered = decode_text(token_ids[:num_covered])
        is_ended = choice.finish_reason not in (None, *INCOMPLETE_REASONS)
        if not is_ended and not (choice.text.startswith(covered) and decode_text(token_ids).startswith(choice.text)):
            raise InvariantError(
                2, f"choice {index} reads {choice.text!r}, which is not the text {covered!r} of its tokens"
            )
        if not expected.text.startswith(choice.text):
            raise InvariantError(2, f"choice {index} reads {choice.text!r} instead of {expected.text!r}")

    @staticmethod
    def _may_be_cut_behind(sent: list[int], token_ids: list[int]) -> bool:
        """Returns whether a stream whose events have sent these tokens may end with all of `token_ids`."""
        return sent == token_ids

    # The expected response.

    @property
    def expected(self) -> list[ExpectedChoice]:
        assert self._expected is not None, "the seed is known"
        return self._expected

    @property
    def _only_version(self) -> str | None:
        versions = self.request.versions
        return versions[0] if len(versions) == 1 else None

    def _fix_seed(self, seed: int) -> None:
        if self._seed is None:
            self._seed = seed
            self._expect()

    def _expect(self) -> None:
        """Computes the expected choices once the seed and the answering model are known."""
        if self._seed is None or self.model is None:
            return
        expected = [
            expected_choice(self.request, self._prompt, self._seed, index, self.model)
            for index in range(self.request.n)
        ]
        if self._speaks_tokens:
            expected = [replace(entry, text="") for entry in expected]
        self._expected = expected

    @property
    def _speaks_tokens(self) -> bool:
        return self.request.path == "/v1/generate"

    def _check_texts(self) -> None:
        if self._expected is None:
            return
        for index, (choice, expected) in enumerate(zip(self.choices, self.expected, strict=True)):
            if not expected.text.startswith(choice.text):
                raise InvariantError(2, f"choice {index} reads {choice.text!r} instead of {expected.text!r}")

    def check_end(self) -> None:
        """Checks a response that has ended, completely or by an abort."""
        self._check_texts()
        if self._was_aborted:
            self._check_aborted()
            return
        if self._expected is None:
            return  # a complete response, and the client does not know its seed
        for index, (choice, expected) in enumerate(zip(self.choices, self.expected, strict=True)):
            if choice.finish_reason != expected.finish_reason:
                raise InvariantError(
                    2, f"choice {index} ends by {choice.finish_reason} instead of {expected.finish_reason}"
                )
            if choice.text != expected.text:
                raise InvariantError(2, f"choice {index} reads {choice.text!r} instead of {expected.text!r}")
            if (self.request.is_streaming or self._speaks_tokens) and choice.token_ids != expected.token_ids:
                raise InvariantError(2, f"choice {index} has {choice.token_ids} instead of {expected.token_ids}")
            if self.request.logprobs is not None:
                self._check_logprobs(index, choice, expected)
        self._check_usage()
        if not self.request.is_streaming:
            self.num_tokens = sum(len(entry.token_ids) for entry in self.expected)

    def _check_aborted(self) -> None:
        if self.request.abort_at_s is None:
            raise InvariantError(2, "it was aborted without a request to abort it")
        for index, choice in enumerate(self.choices):
            if choice.finish_reason == ABORT:
                self._check_incomplete(index, choice)

    def _check_logprobs(self, index: int, choice: ReceivedChoice, expected: ExpectedChoice) -> None:
        wanted_values = [-token / 8 for token in expected.token_ids]
        if choice.logprobs != wanted_values:
            raise InvariantError(2, f"choice {index} has the logprobs {choice.logprobs} instead of {wanted_values}")

    def _check_usage(self) -> None:
        if self.usage is None:
            if self.request.wants_usage or not self.request.is_streaming:
                raise InvariantError(2, "no usage")
            return
        wanted_values = (len(self._prompt), sum(len(choice.token_ids) for choice in self.expected))
        reported = (self.usage["prompt_tokens"], self.usage["completion_tokens"])
        if reported != wanted_values:
            raise InvariantError(2, f"the usage is {reported} instead of {wanted_values}")


def _take_ids(choice: ReceivedChoice, data: dict[str, Any]) -> None:
    choice.all_token_ids = data.get("completion_token_ids", choice.all_token_ids)
    choice.num_text_tokens = data.get("num_text_tokens", choice.num_text_tokens)


def _logprobs(logprobs: Any) -> list[float]:
    """Returns the logprobs of the chosen tokens, from the format of any endpoint."""
    if not logprobs:
        return []
    if isinstance(logprobs, list):
        return [entry["logprob"] for entry in logprobs]
    if "token_logprobs" in logprobs:
        return list(logprobs["token_logprobs"])
    return [entry["logprob"] for entry in logprobs["content"]]
