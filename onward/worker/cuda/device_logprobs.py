"""How likely tokens were, by the model's own logits: computed on the device, read when the step is done."""

import torch

from onward.kernels.ops import Ops
from onward.proto.step import TokenLogprobs
from onward.worker.cuda.staging_buffer import to_host


class PendingLogprobs:
    """Of some rows, each with its token. Ties among the likeliest are ordered by token id."""

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, num_tops: list[int], ops: Ops) -> None:
        """logits float32 [rows, vocabulary], tokens [rows]."""
        assert len(logits) == len(num_tops), "every row of logits has its number of top tokens"
        assert len(tokens) == len(num_tops), "every row of logits has its token"
        own = logits.gather(1, tokens.long()[:, None])
        totals = ops.logsumexp(logits)[:, None]
        most = max(num_tops)
        values, ids = logits.sort(dim=1, descending=True, stable=True) if most else (logits, tokens[:, None])
        self._num_tops = num_tops
        self._numbers = to_host(torch.cat([own.double(), values[:, :most].double()], 1) - totals)
        self._ids = to_host(torch.cat([(logits > own).sum(1, keepdim=True), ids[:, :most]], 1))

    def read(self) -> list[TokenLogprobs]:
        """Once the device has passed the step."""
        numbers, ids = self._numbers.tolist(), self._ids.tolist()
        return [
            TokenLogprobs(own[0], places[0] + 1, list(zip(places[1 : top + 1], own[1 : top + 1], strict=True)))
            for own, places, top in zip(numbers, ids, self._num_tops, strict=True)
        ]
