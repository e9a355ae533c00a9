import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onward.worker.token_logprobs import token_logprobs


@given(st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=50), st.integers(0, 49), st.integers(0, 5))
def test_logprobs_are_those_of_a_softmax(values: list[float], token: int, num_top: int) -> None:
    logits = np.array(values, np.float32)
    token, num_top = token % len(values), min(num_top, len(values))
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    found = token_logprobs(logits, token, num_top)
    assert abs(found.logprob - exact[token]) < 1e-4
    assert found.rank == 1 + sum(value > logits[token] for value in logits)
    order = sorted(range(len(values)), key=lambda t: (-logits[t], t))[:num_top]
    assert [t for t, _ in found.top] == order
    assert all(abs(p - exact[t]) < 1e-4 for t, p in found.top)
