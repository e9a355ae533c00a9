"""Biases, allowed tokens, bad words and penalties on the device, as in `worker.logits_processors.penalties`. They need no
token on the host.

Such requests are rare, so each row has launches of its own.
"""

import numpy as np
import torch

from onward.proto.sampling_params import SamplingParams
from onward.worker.cuda.staging_buffer import to_device


class DeviceLogitsProcessor:
    """The logits processor of one slot. It is built from the whole token list, so it continues where the last slot of
    this request ended."""

    def __init__(
        self, sampling: SamplingParams, prompt: np.ndarray, output: np.ndarray, vocab_size: int, device: str
    ) -> None:
        self._sampling = sampling
        known_bias = [(token, bias) for token, bias in sampling.logit_bias if token < vocab_size]
        self._bias_ids = to_device([token for token, _ in known_bias], torch.int64, device)
        self._biases = to_device([bias for _, bias in known_bias], torch.float32, device)
        bad_token_ids = [word[0] for word in sampling.bad_words if len(word) == 1 and word[0] < vocab_size]
        self._bad_token_ids = to_device(bad_token_ids, torch.int64, device)
        self._disallowed: torch.Tensor | None = None
        if sampling.allowed_token_ids:
            disallowed = np.ones(vocab_size, np.bool_)
            disallowed[[token for token in sampling.allowed_token_ids if token < vocab_size]] = False
            self._disallowed = torch.from_numpy(disallowed).to(device)
        sequences = [word for word in sampling.bad_words if len(word) > 1 and word[-1] < vocab_size]
        self._bad_sequences = [(to_device(sequence[:-1], torch.int32, device), sequence[-1]) for sequence in sequences]
        self._counts: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts = torch.from_numpy(np.bincount(output, minlength=vocab_size).astype(np.int32)).to(device)
        if sampling.repetition_penalty != 1.0:
            seen = np.bincount(np.concatenate([prompt, output]), minlength=vocab_size) > 0
            self._seen = torch.from_numpy(seen).to(device)

    def apply(self, logits: torch.Tensor, tokens: torch.Tensor, num_known: int, num_output: int) -> None:
        """Changes one row of float32 logits in place. `tokens` are the slot's; the last `num_output` known ones count for
        bad words."""
        assert num_output <= num_known, "output tokens are part of the known tokens"
        sampling = self._sampling
        if self._seen is not None:
            penalized = torch.where(
                logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty
            )
            logits.copy_(torch.where(self._seen, penalized, logits))
        if self._counts is not None:
            penalty = self._counts.float() * sampling.frequency_penalty + sampling.presence_penalty
            logits.copy_(torch.where(self._counts > 0, logits - penalty, logits))
        logits.index_add_(0, self._bias_ids, self._biases)
        if self._disallowed is not None:
            logits.masked_fill_(self._disallowed, -torch.inf)
        logits.index_fill_(0, self._bad_token_ids, -torch.inf)
        for prefix, last in self._bad_sequences:
            if num_output >= len(prefix):
                matches = (tokens[num_known - len(prefix) : num_known] == prefix).all()
                logits[last] = torch.where(matches, -torch.inf, logits[last])

    def advance(self, token: torch.Tensor) -> None:
        """Advances the processor by a sampled token; `token` is one number, on the device."""
        index = token.view(1).long()
        if self._counts is not None:
            self._counts.index_add_(0, index, torch.ones_like(index, dtype=torch.int32))
        if self._seen is not None:
            self._seen.index_fill_(0, index, True)
