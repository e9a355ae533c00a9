"""Logprobs of tokens by the model's own logits, before any processing.

The bits are equal on every CPU: the order of all sums is fixed, and every function is either our own or rounded alike
everywhere. The `exp` and `log` of numpy and C are not.
"""

import math

import numpy as np

from onward.kernels.cpu.exp_sum import exp_sum
from onward.proto.step import TokenLogprobs

_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_LOG = (1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
        2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01)  # fmt: skip
"""Coefficients of fdlibm: log((1 + s) / (1 - s)) = 2 s + s * (these times powers of s * s, highest first)."""


def token_logprobs(logits: np.ndarray, token: int, num_top: int) -> TokenLogprobs:
    """Returns the logprob and rank of `token` in one row, with the `num_top` likeliest tokens. Ties among these are
    ordered by token id."""
    log_total = _log_sum_exp(logits)
    rank = int((logits > logits[token]).sum()) + 1
    top = [(int(token_id), float(logits[token_id]) - log_total) for token_id in _top_tokens(logits, num_top)]
    return TokenLogprobs(float(logits[token]) - log_total, rank, top)


def _log_sum_exp(logits: np.ndarray) -> float:
    peak = logits.max()
    if not math.isfinite(peak):
        return math.nan  # one logit is not a number, or all are forbidden
    return float(peak) + _log(exp_sum(logits, peak))


def _log(x: float) -> float:
    """Returns the natural logarithm of a positive number, by operations whose rounding IEEE 754 defines."""
    assert x > 0, "the sum of exponentials is positive"
    mantissa, exponent = math.frexp(x)
    if mantissa < math.sqrt(0.5):
        mantissa, exponent = 2.0 * mantissa, exponent - 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = 0.0
    for coefficient in _LOG:
        series = (series + coefficient) * square
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + s * (2.0 + series))


def _top_tokens(logits: np.ndarray, count: int) -> np.ndarray:
    if count == 0:
        return np.empty(0, np.int64)
    # Tokens that equal the last one are candidates too, so that ties are settled by id and not by the algorithm.
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    candidates = np.flatnonzero(logits >= threshold)
    return candidates[np.lexsort((candidates, -logits[candidates]))][:count]
