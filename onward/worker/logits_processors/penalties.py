"""The logits processor of a request: biases, allowed tokens, bad words, and penalties that depend on its tokens so far.

It is created when a slot is assigned, by replaying the whole token list, and advanced after each sample. So it is a
function of (request, tokens so far), and is the same after a preemption, a crash, or on another machine.
"""

import copy

import numpy as np

from onward.proto.sampling_params import SamplingParams

FORBIDDEN = np.float32(-np.inf)


class LogitsProcessor:
    def __init__(self, sampling: SamplingParams, prompt: np.ndarray, output: np.ndarray, vocab_size: int) -> None:
        self._sampling = sampling
        known_bias = [(token, bias) for token, bias in sampling.logit_bias if token < vocab_size]
        self._bias_ids = np.array([token for token, _ in known_bias], np.int64)
        self._biases = np.array([bias for _, bias in known_bias], np.float32)
        self._bad_token_ids = np.array(
            [word[0] for word in sampling.bad_words if len(word) == 1 and word[0] < vocab_size], np.int64
        )
        self._bad_sequences = [word for word in sampling.bad_words if len(word) > 1 and word[-1] < vocab_size]
        self._disallowed = _disallowed(sampling, vocab_size) if sampling.allowed_token_ids else None
        self._max_sequence_length = max((len(sequence) for sequence in self._bad_sequences), default=1)
        self._tail: list[int] = []
        """The newest output tokens, as many as the longest bad word needs."""
        self._counts = np.zeros(vocab_size, np.int32) if self._counts_output else None
        self._seen = np.zeros(vocab_size, np.bool_) if sampling.repetition_penalty != 1.0 else None
        if self._seen is not None:
            self._seen[prompt] = True
        for token in output.tolist():
            self.advance(token)

    @staticmethod
    def is_needed(sampling: SamplingParams) -> bool:
        """Returns whether these parameters need a processor. Most requests need none, and have no cost."""
        penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty - 1.0)
        return any(penalties) or bool(sampling.logit_bias or sampling.bad_words or sampling.allowed_token_ids)

    @property
    def _counts_output(self) -> bool:
        return bool(self._sampling.presence_penalty or self._sampling.frequency_penalty)

    def apply(self, logits: np.ndarray) -> None:
        """Changes one row in place. Penalties come first, so that forbidden tokens stay forbidden."""
        if self._seen is not None:
            ids = np.flatnonzero(self._seen)
            seen, penalty = logits[ids], np.float32(self._sampling.repetition_penalty)
            logits[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self._counts is not None:
            ids = np.flatnonzero(self._counts)
            frequency = np.float32(self._sampling.frequency_penalty) * self._counts[ids].astype(np.float32)
            logits[ids] -= frequency + np.float32(self._sampling.presence_penalty)
        np.add.at(logits, self._bias_ids, self._biases)
        if self._disallowed is not None:
            logits[self._disallowed] = FORBIDDEN
        logits[self._bad_token_ids] = FORBIDDEN
        for sequence in self._bad_sequences:
            if (
                self._tail[len(self._tail) - len(sequence) + 1 :] == list(sequence[:-1])
                and len(self._tail) >= len(sequence) - 1
            ):
                logits[sequence[-1]] = FORBIDDEN

    def advance(self, token: int) -> None:
        if self._counts is not None:
            self._counts[token] += 1
        if self._seen is not None:
            self._seen[token] = True
        if self._max_sequence_length > 1:
            self._tail = [*self._tail, token][1 - self._max_sequence_length :]

    def copy(self) -> "LogitsProcessor":
        """Returns a copy, to be advanced by tokens that may not be accepted."""
        clone = copy.copy(self)
        clone._counts = None if self._counts is None else self._counts.copy()
        clone._seen = None if self._seen is None else self._seen.copy()
        return clone


def _disallowed(sampling: SamplingParams, vocab_size: int) -> np.ndarray:
    """Returns which tokens of the vocabulary the request does not allow."""
    disallowed = np.ones(vocab_size, np.bool_)
    disallowed[[token for token in sampling.allowed_token_ids if token < vocab_size]] = False
    return disallowed
