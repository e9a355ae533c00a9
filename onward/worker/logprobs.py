"""How likely a token was, by the model's own logits, before anything was done to them. Fixed order, so fixed bits."""

import numpy as np

from onward.proto.step import TokenLogprobs


def token_logprobs(logits: np.ndarray, token: int, num_top: int) -> TokenLogprobs:
    """Of one row. Ties among the likeliest are ordered by token id."""
    high = logits.max()
    log_total = high + np.log(np.exp(logits - high, dtype=np.float32).sum(dtype=np.float64))
    rank = int((logits > logits[token]).sum()) + 1
    top = [(int(t), float(logits[t] - log_total)) for t in _likeliest(logits, num_top)]
    return TokenLogprobs(float(logits[token] - log_total), rank, top)


def _likeliest(logits: np.ndarray, count: int) -> np.ndarray:
    if count == 0:
        return np.empty(0, np.int64)
    # Whatever equals the last of them is a candidate too, so that ties are settled by id and not by the algorithm.
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    candidates = np.flatnonzero(logits >= threshold)
    return candidates[np.lexsort((candidates, -logits[candidates]))][:count]
