"""What fits, and where a list of tokens has ended."""

import pytest

from onward.errors import InvalidRequest
from onward.output_limits import find_end, output_limit
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import WorkerHello


def worker(max_model_len: int = 100, num_blocks: int = 10, block_size: int = 16) -> WorkerHello:
    return WorkerHello(1, "w", "e", 1, "fp", num_blocks, block_size, max_model_len, 320)


def test_without_a_wish_the_output_takes_what_fits() -> None:
    assert output_limit(40, None, 0, worker(), "prompt") == 60
    assert output_limit(40, None, 0, worker(num_blocks=5), "prompt") == 40, "the pool is smaller than the context"


def test_a_default_limits_outputs_without_a_wish_and_refuses_nothing() -> None:
    assert output_limit(40, None, 0, worker(), "prompt", default=16) == 16
    assert output_limit(90, None, 0, worker(), "prompt", default=16) == 10, "what fits is less"
    assert output_limit(40, None, 20, worker(), "prompt", default=16) == 20, "at least min_tokens"
    assert output_limit(40, 50, 0, worker(), "prompt", default=16) == 50


def test_what_just_fits_is_accepted_and_one_more_is_not() -> None:
    assert output_limit(40, 60, 0, worker(), "prompt") == 60
    with pytest.raises(InvalidRequest, match=r"by 1\Z"):
        output_limit(40, 61, 0, worker(), "prompt")
    with pytest.raises(InvalidRequest, match=r"\Amax_completion_tokens: 40 prompt tokens and 61 of output exceed"):
        output_limit(40, 61, 0, worker(), "prompt", "max_completion_tokens")
    assert output_limit(99, None, 0, worker(), "prompt") == 1
    with pytest.raises(InvalidRequest, match="1 too long"):
        output_limit(100, None, 0, worker(), "prompt")


def test_the_error_says_what_is_too_small() -> None:
    with pytest.raises(InvalidRequest, match="the context"):
        output_limit(40, 100, 0, worker(), "prompt")
    with pytest.raises(InvalidRequest, match="the KV pool"):
        output_limit(40, 100, 0, worker(num_blocks=5), "prompt")


@pytest.mark.parametrize(
    ("tokens", "end"),
    [
        ([1, 2, 3], None),
        ([], None),
        ([1, 9], (2, "stop")),
        ([9, 1, 2], None),
        ([1, 9, 2, 2, 2], (2, "stop")),
        ([1, 2, 3, 4, 5], (5, "length")),
        ([1, 2, 3, 4, 9], (5, "stop")),
        ([1, 2, 3, 4, 5, 6], (5, "length")),
    ],
)
def test_a_list_ends_at_its_first_end(tokens: list[int], end: tuple[int, str] | None) -> None:
    sampling = SamplingParams(seed=1, max_tokens=5, min_tokens=1, end_token_ids=(9,))
    assert find_end(tokens, sampling) == end


def test_a_list_that_completes_its_grammar_has_ended_there() -> None:
    sampling = SamplingParams(seed=1, max_tokens=3, min_tokens=3, end_token_ids=(9,))
    assert find_end([1, 2, 3], sampling, grammar_completed_at=2) == (2, "stop")
    assert find_end([1, 2, 3], sampling, grammar_completed_at=3) == (3, "stop")
    assert find_end([1, 2], sampling, grammar_completed_at=None) is None
