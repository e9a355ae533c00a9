"""A small engine that keeps the real one's contract with the api, and makes its tokens up.

The next token is a hash of everything that may decide it, so a token that is lost, repeated or out of place shows.
"""

import hashlib
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from onward.proto.engine import (
    Abort,
    AbortByName,
    AbortReply,
    ErrorInfo,
    FromEngine,
    HeldRequest,
    HeldRequestsReport,
    KvEventsReply,
    QueryKvEvents,
    RequestAccepted,
    Submit,
    ToEngine,
    TokenDelta,
    TokenDeltas,
    WorkerCrashReport,
)
from onward.proto.kv_events import KvEvents
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import TokenLogprobs

Choose = Callable[[Sequence[int], SamplingParams, Sequence[int]], int]
GiveUp = Callable[[SamplingParams, int], ErrorInfo | None]


def never(sampling: SamplingParams, num_tokens: int) -> None:
    return None


def never_complete(sampling: SamplingParams, tokens: Sequence[int]) -> bool:
    return False


def hashed_token(prompt: Sequence[int], sampling: SamplingParams, tokens: Sequence[int]) -> int:
    """A token id from 97 on, 26 of them: in the tests' tokenizer these are letters."""
    history = repr((list(prompt), sampling.seed, sampling.choice_index, list(tokens))).encode()
    return 97 + int.from_bytes(hashlib.blake2b(history, digest_size=4).digest()) % 26


def made_up_logprobs(token_id: int, position: int, num_top: int) -> TokenLogprobs:
    """Different at each position, so that one which is lost, repeated or out of place shows."""
    others = [((token_id + rank) % 256, -(position + rank / 8)) for rank in range(1, num_top)]
    return TokenLogprobs(-float(position), 1, [(token_id, -float(position)), *others] if num_top else [])


@dataclass(slots=True)
class Running:
    submit: Submit
    tokens: list[int]
    arrived_at_s: float = 0.0

    @property
    def names(self) -> set[str]:
        return {self.submit.request_id.rpartition("-")[0], self.submit.client_request_id} - {""}


@dataclass(slots=True)
class StandInEngine:
    incarnation: str
    choose: Choose = hashed_token
    refusal: ErrorInfo | None = None
    """What every submission is answered with, if set."""
    is_complete: Callable[[SamplingParams, Sequence[int]], bool] = never_complete
    """Whether these tokens complete the request's grammar."""
    give_up: GiveUp = never
    """Asked before each token: an error ends that request with `pd_reschedule`."""
    claimed_drafts: int = 0
    """Number of drafts that is claimed with each token. A reader that trusts a huge number runs out of memory."""
    paused: bool = False
    steps_at_once: int = 1
    """Taken before anybody else gets a turn: with many, tokens come in bursts and a long answer takes no time."""
    worker_crashes: int = 0
    running: dict[str, Running] = field(default_factory=dict)
    submits: list[Submit] = field(default_factory=list)
    aborts: list[Abort] = field(default_factory=list)
    asked_aborts: list[AbortByName] = field(default_factory=list)
    buried: set[str] = field(default_factory=set)
    """Aborted by name, and never to be run again."""
    cache_changes: list[tuple[bool, bytes]] = field(default_factory=list)
    """From the first on."""
    last_words: list[TokenDelta] = field(default_factory=list)
    seq: int = 0
    num_steps: int = 0

    def handle(self, message: ToEngine) -> list[FromEngine]:
        self.seq = max(self.seq, message.seq)
        if isinstance(message, Abort):
            self.aborts.append(message)
            held = self.running.get(message.request_id)
            if held and (message.epoch is None or message.epoch >= held.submit.epoch):
                del self.running[message.request_id]
            return []
        if isinstance(message, AbortByName):
            return self._abort_by_name(message)
        if isinstance(message, QueryKvEvents):
            return [KvEventsReply(message.query_id, self._kv_events(message.next_event))]
        self.submits.append(message)
        held = self.running.get(message.request_id)
        if held and held.submit.epoch >= message.epoch:
            return []
        if message.request_id in self.buried:
            return [TokenDeltas(self.num_steps, [_aborted(Running(message, message.generated_token_ids))])]
        if self.refusal is not None:
            position = len(message.generated_token_ids)
            return [TokenDeltas(self.num_steps, [_refused(message, self.refusal, position, "error")])]
        arrived_at_s = time.monotonic() - message.waited_s
        self.running[message.request_id] = Running(message, list(message.generated_token_ids), arrived_at_s)
        answers: list[FromEngine] = [RequestAccepted(message.request_id, message.epoch)]
        if self.worker_crashes:
            answers.append(WorkerCrashReport(message.request_id, message.epoch, self.worker_crashes))
        return answers

    def step(self) -> TokenDeltas | None:
        """One token for every running request, and the ends of those that were aborted."""
        deltas, self.last_words = self.last_words, []
        if not self.paused:
            deltas += [self._next(one) for one in list(self.running.values())]
        if not deltas:
            return None
        self.num_steps += 1
        return TokenDeltas(self.num_steps, deltas)

    def holding(self) -> HeldRequestsReport:
        held = [
            HeldRequest(request_id, one.submit.epoch, len(one.tokens), num_computed=10 + place, queue_position=place)
            for place, (request_id, one) in enumerate(self.running.items(), 3)
        ]
        return HeldRequestsReport(self.incarnation, self.seq, self.num_steps, held)

    def _kv_events(self, next_number: int) -> KvEvents:
        if next_number < 0:
            return KvEvents(0, self.cache_changes, reset=True)
        return KvEvents(next_number, self.cache_changes[next_number:])

    def _abort_by_name(self, message: AbortByName) -> list[FromEngine]:
        self.asked_aborts.append(message)
        by_name: dict[str, list[Running]] = {}
        # Only requests that were there when the abort came: a later one may have the same label.
        since_s = time.monotonic() - (message.received_ago_s or 0.0)
        matching = [
            one
            for one in self.running.values()
            if message.caller in (None, one.submit.caller) and one.arrived_at_s <= since_s
        ]
        for one in matching:
            for name in one.names:
                by_name.setdefault(name, []).append(one)
        ids = {one.submit.request_id.rpartition("-")[0] for one in matching}
        names = ids if message.abort_all else set(message.names)
        for name in names & by_name.keys():
            for one in by_name[name]:
                if self.running.pop(one.submit.request_id, None):
                    self.buried.add(one.submit.request_id)
                    self.last_words.append(_aborted(one))
        return [AbortReply(message.query_id, sorted(names & by_name.keys()), sorted(names - by_name.keys()))]

    def _next(self, one: Running) -> TokenDelta:
        sampling, position = one.submit.sampling_params, len(one.tokens)
        if sampling.pooling is not None:
            del self.running[one.submit.request_id]
            return _embedded(one.submit)
        if (error := self.give_up(sampling, position)) is not None:
            del self.running[one.submit.request_id]
            return _refused(one.submit, error, position, "pd_reschedule")
        token = self.choose(one.submit.prompt_token_ids, sampling, one.tokens)
        one.tokens.append(token)
        reason = None
        if (position >= sampling.min_tokens and token in sampling.end_token_ids) or self.is_complete(
            sampling, one.tokens
        ):
            reason = "stop"
        elif len(one.tokens) == sampling.max_tokens:
            reason = "length"
        if reason is not None:
            del self.running[one.submit.request_id]
        return TokenDelta(
            one.submit.request_id,
            one.submit.epoch,
            position,
            [token],
            len(one.submit.prompt_token_ids),
            num_cached_tokens=3,
            finish_reason=reason,
            num_draft_tokens=self.claimed_drafts,
            logprobs=None if sampling.logprobs is None else [made_up_logprobs(token, position, sampling.logprobs)],
            prompt_logprobs=_of_prompt(one.submit) if _is_prompt_due(one.submit, position) else None,
            rescored_logprobs=_rescored(one.submit) if position == len(one.submit.generated_token_ids) else None,
        )


def _of_prompt(submit: Submit) -> list[TokenLogprobs] | None:
    num_top = submit.sampling_params.prompt_logprobs
    if num_top is None:
        return None
    return [made_up_logprobs(token, place, num_top) for place, token in enumerate(submit.prompt_token_ids) if place]


def _rescored(submit: Submit) -> list[TokenLogprobs] | None:
    start, tokens = submit.rescore_from, submit.generated_token_ids
    if start is None:
        return None
    num_top = submit.sampling_params.logprobs or 0
    return [made_up_logprobs(tokens[at], at, num_top) for at in range(max(0, start), len(tokens))]


def _is_prompt_due(submit: Submit, position: int) -> bool:
    """With the first token, and again where that is asked for."""
    return position == 0 or (submit.rescore_from == -1 and position == len(submit.generated_token_ids))


def made_up_vector(prompt: Sequence[int], pooling: str) -> list[float]:
    """Four numbers that tell prompts and kinds of pooling apart."""
    return [float(len(prompt)), float(prompt[-1]), float(len(pooling)), 1.0]


def _embedded(submit: Submit) -> TokenDelta:
    vector = array("f", made_up_vector(submit.prompt_token_ids, submit.sampling_params.pooling or "")).tobytes()
    num_prompt = len(submit.prompt_token_ids)
    return TokenDelta(submit.request_id, submit.epoch, 0, [], num_prompt, 0, finish_reason="stop", embedding=vector)


def _aborted(one: Running) -> TokenDelta:
    submit = one.submit
    return TokenDelta(
        submit.request_id, submit.epoch, len(one.tokens), [], len(submit.prompt_token_ids), 3, finish_reason="abort"
    )


def _refused(submit: Submit, error: ErrorInfo, position: int, reason: str) -> TokenDelta:
    return TokenDelta(submit.request_id, submit.epoch, position, [], len(submit.prompt_token_ids), 0, reason, error)


def expected_tokens(
    prompt: Sequence[int], sampling: SamplingParams, count: int, choose: Choose = hashed_token
) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(choose(prompt, sampling, tokens))
    return tokens
