"""Logprobs of tokens by the model's own logits: computed on the device, read when the step is done."""

import torch

from onward.kernels.ops import Ops
from onward.proto.step import TokenLogprobs
from onward.worker.cuda.staging_buffer import to_host


class PendingLogprobs:
    """Logprobs of some rows, each for its token. Ties among the likeliest tokens are ordered by token id."""

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, num_tops: list[int], ops: Ops) -> None:
        """logits float32 [rows, vocabulary], tokens [rows]."""
        assert len(logits) == len(num_tops), "every row of logits has its number of top tokens"
        assert len(tokens) == len(num_tops), "every row of logits has its token"
        token_logits = logits.gather(1, tokens.long()[:, None])
        totals = ops.logsumexp(logits)[:, None]
        max_tops = max(num_tops)
        values, ids = logits.sort(dim=1, descending=True, stable=True) if max_tops else (logits, tokens[:, None])
        self._num_tops = num_tops
        self._values = to_host(torch.cat([token_logits.double(), values[:, :max_tops].double()], 1) - totals)
        self._ids = to_host(torch.cat([(logits > token_logits).sum(1, keepdim=True), ids[:, :max_tops]], 1))

    def read(self) -> list[TokenLogprobs]:
        """Returns the logprobs. Called only when the step is done."""
        values, ids = self._values.tolist(), self._ids.tolist()
        return [
            TokenLogprobs(
                logprobs[0], row_ids[0] + 1, list(zip(row_ids[1 : num_top + 1], logprobs[1 : num_top + 1], strict=True))
            )
            for logprobs, row_ids, num_top in zip(values, ids, self._num_tops, strict=True)
        ]
