"""An output of `onward.LLM` while it grows. Takes tokens and returns text; knows nothing of the engine."""

from collections import deque
from dataclasses import dataclass, field

from onward.proto.engine import ErrorInfo, TokenDelta
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import TokenLogprobs
from onward.text.text_stream import TextStream


@dataclass(frozen=True, slots=True)
class Completion:
    text: str
    token_ids: list[int]
    finish_reason: str
    """`stop`, `length` or `error`. With `error`, the field `error` has the cause; other completions are not
    affected."""
    prompt_token_ids: list[int]
    num_cached_tokens: int
    error: ErrorInfo | None = None
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`, if requested."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """One for each prompt token from the second one on, if requested."""


@dataclass(frozen=True, slots=True)
class CompletionChunk:
    """Text and tokens that one step added to an output."""

    text: str
    num_tokens: int
    """Tokens of the whole output so far."""
    finish_reason: str | None = None


@dataclass(slots=True)
class OfflineRequest:
    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    text_stream: TextStream
    attempt_epoch: int = 0
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached_tokens: int | None = None
    error: ErrorInfo | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    unread_chunks: deque[CompletionChunk] = field(default_factory=deque)
    """Chunks that the caller has not taken yet."""
    _texts: list[str] = field(default_factory=list)

    def apply_delta(self, delta: TokenDelta) -> None:
        assert delta.position == len(self.token_ids), "the next position, and no other"
        texts: list[str] = []
        for token_id in delta.token_ids:
            self.token_ids.append(token_id)
            texts.append(self.text_stream.push(token_id))
            if self.text_stream.stopped:
                break
        self._take_logprobs(delta, len(texts))
        self.num_cached_tokens = delta.num_cached_tokens
        self.finish_reason = "stop" if self.text_stream.stopped else delta.finish_reason
        self.error = None if self.text_stream.stopped else delta.error
        if self.finish_reason is not None:
            texts.append(self.text_stream.finish(self.finish_reason))
        self._texts += texts
        self.unread_chunks.append(CompletionChunk("".join(texts), len(self.token_ids), self.finish_reason))

    def _take_logprobs(self, delta: TokenDelta, num_tokens: int) -> None:
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs[:num_tokens]
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs

    def completion(self) -> Completion:
        assert self.finish_reason is not None, "it has ended"
        return Completion(
            "".join(self._texts),
            self.token_ids,
            self.finish_reason,
            self.prompt_token_ids,
            self.num_cached_tokens or 0,
            self.error,
            self.logprobs,
            self.prompt_logprobs,
        )
