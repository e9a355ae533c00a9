"""What a request's own tokens do to its logits, and that it is a function of those tokens alone."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.proto.sampling_params import SamplingParams
from onward.worker.logits_processors.penalties import LogitsProcessor

VOCAB = 12


def processed(
    sampling: SamplingParams, prompt: list[int], output: list[int], logits: list[float] | None = None
) -> np.ndarray:
    row = np.array(logits if logits is not None else np.linspace(-2, 3, VOCAB), np.float32)
    LogitsProcessor(sampling, np.array(prompt, np.int32), np.array(output, np.int32), VOCAB).apply(row)
    return row


def test_a_request_without_rules_needs_none() -> None:
    assert not LogitsProcessor.is_needed(SamplingParams(seed=1))
    assert LogitsProcessor.is_needed(SamplingParams(seed=1, presence_penalty=0.1))
    assert LogitsProcessor.is_needed(SamplingParams(seed=1, repetition_penalty=1.1))
    assert LogitsProcessor.is_needed(SamplingParams(seed=1, bad_words=((3,),)))
    assert LogitsProcessor.is_needed(SamplingParams(seed=1, logit_bias=((3, 1.0),)))
    assert LogitsProcessor.is_needed(SamplingParams(seed=1, allowed_token_ids=(3,)))


def test_only_allowed_tokens_are_left_and_bad_words_among_them_are_not() -> None:
    sampling = SamplingParams(seed=1, allowed_token_ids=(2, 5, 7, VOCAB + 1), bad_words=((7,),), logit_bias=((3, 9.0),))
    row = processed(sampling, prompt=[1], output=[])
    assert np.flatnonzero(np.isfinite(row)).tolist() == [2, 5]


def test_presence_and_frequency_count_the_output_and_not_the_prompt() -> None:
    sampling = SamplingParams(seed=1, presence_penalty=0.5, frequency_penalty=0.25)
    row = processed(sampling, prompt=[1, 1], output=[2, 2, 3], logits=[1.0] * VOCAB)
    expected = np.ones(VOCAB, np.float32)
    expected[2] -= 0.5 + 2 * 0.25
    expected[3] -= 0.5 + 0.25
    assert (row == expected).all()


def test_repetition_divides_what_is_likely_and_multiplies_what_is_not() -> None:
    row = processed(
        SamplingParams(seed=1, repetition_penalty=2.0), prompt=[0], output=[5], logits=[-1.0] + [4.0] * (VOCAB - 1)
    )
    assert row[0] == -2.0
    assert row[5] == 2.0
    assert row[1] == 4.0


def test_a_bias_is_added_and_a_bad_word_is_never_completed() -> None:
    sampling = SamplingParams(seed=1, logit_bias=((4, 7.5), (5, -100.0)), bad_words=((9,), (2, 3), (6, 7, 8)))
    row = processed(sampling, prompt=[2, 6, 7], output=[], logits=[0.0] * VOCAB)
    assert row[4] == 7.5
    assert row[5] == -100.0
    assert np.isneginf(row[9])
    assert row[3] == row[8] == 0.0, "the prompt begins no bad word"
    assert np.isneginf(processed(sampling, [1], [2])[3])
    assert np.isneginf(processed(sampling, [1], [0, 6, 7])[8])
    assert not np.isneginf(processed(sampling, [1], [6, 7, 0])[8])
    assert not np.isneginf(processed(sampling, [1], [7])[8])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, VOCAB - 1), max_size=8),
    st.lists(st.integers(0, VOCAB - 1), max_size=20),
    st.integers(0, 20),
    st.sampled_from([0.0, 0.7]),
    st.sampled_from([1.0, 1.3]),
)
def test_replaying_the_list_gives_the_state_that_advancing_gave(
    prompt: list[int], output: list[int], cut: int, penalty: float, repetition: float
) -> None:
    sampling = SamplingParams(
        seed=1,
        presence_penalty=penalty,
        frequency_penalty=penalty,
        repetition_penalty=repetition,
        bad_words=((1, 2), (3, 3, 3)),
    )
    advanced = LogitsProcessor(sampling, np.array(prompt, np.int32), np.array(output[:cut], np.int32), VOCAB)
    for token in output[cut:]:
        advanced.advance(token)
    row = np.linspace(-2, 3, VOCAB, dtype=np.float32)
    advanced.apply(row)
    assert (row == processed(sampling, prompt, output)).all()
