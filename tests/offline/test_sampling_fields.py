"""Penalties, biases, bad words and logprobs of `onward.LLM`: what is said reaches the worker, what it tells comes back."""

from pathlib import Path

import pytest

from onward.config import EngineConfig
from onward.errors import InvalidRequest
from onward.llm import LLM, SamplingOptions
from onward.offline.output import OfflineRequest
from onward.proto.engine import TokenDelta
from onward.proto.model import PreparedModel
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import StepPlan, StepResult, TokenLogprobs
from onward.sim.hash_worker import HashWorker, expected_logprobs
from onward.text.text_stream import TextStream
from onward.text.token_table import TokenTable
from tests.api import small_model

VOCAB = small_model.VOCAB_SIZE
CONFIG = EngineConfig(max_num_seqs=4, max_num_batched_tokens=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return small_model.prepare(Path(tmp_path_factory.mktemp("small-model")))


class Overhearing(HashWorker):
    """Keeps what it was told to do."""

    def __init__(self) -> None:
        super().__init__(64, 16, vocab_size=VOCAB, max_model_len=256)
        self.samplings: list[SamplingParams] = []

    def step(self, plan: StepPlan) -> StepResult:
        self.samplings += [assign.sampling_params for assign in plan.assign]
        return super().step(plan)


def test_the_worker_is_told_what_was_asked_for(model: PreparedModel) -> None:
    worker = Overhearing()
    options = SamplingOptions(
        max_tokens=2,
        seed=3,
        presence_penalty=1,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias={9: 2, 4: -100},
        bad_words=["no", "no", " no"],
        logprobs=2,
        prompt_logprobs=1,
    )
    with LLM.from_runner(model, worker, CONFIG) as llm:
        llm.generate([1, 2, 3], options)
    assert worker.samplings == [
        SamplingParams(
            3,
            max_tokens=2,
            end_token_ids=(small_model.EOS,),
            presence_penalty=1.0,
            frequency_penalty=-0.5,
            repetition_penalty=1.25,
            logit_bias=((4, -100.0), (9, 2.0)),
            bad_words=((*b"no",), (*b" no",)),
            logprobs=2,
            prompt_logprobs=1,
        )
    ]


@pytest.mark.parametrize(("asked", "told"), [(1e-39, 0.0), (9e-6, 0.0), (1e-5, 1e-5), (0, 0.0), (0.7, 0.7)])
def test_a_temperature_that_would_overflow_is_greedy(model: PreparedModel, asked: float, told: float) -> None:
    worker = Overhearing()
    with LLM.from_runner(model, worker, CONFIG) as llm:
        llm.generate([1, 2, 3], SamplingOptions(max_tokens=1, seed=3, temperature=asked))
    assert [sampling.temperature for sampling in worker.samplings] == [told]


def test_a_completion_has_the_logprobs_of_its_tokens_and_of_its_prompt(model: PreparedModel) -> None:
    prompt = list(range(40))
    options = SamplingOptions(max_tokens=8, temperature=0, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    with LLM.from_runner(model, Overhearing(), CONFIG) as llm:
        for _ in range(2):
            [completion] = llm.generate(prompt, options)
            assert completion.logprobs == [expected_logprobs(token, 3) for token in completion.token_ids]
            assert completion.prompt_logprobs == [expected_logprobs(token, 1) for token in prompt[1:]]
        [plain] = llm.generate(prompt, SamplingOptions(max_tokens=8, temperature=0))
    assert (plain.logprobs, plain.prompt_logprobs) == (None, None)


def test_logprobs_behind_a_stop_string_are_not_part_of_the_output() -> None:
    table = TokenTable([bytes([byte]) for byte in range(256)])
    output = OfflineRequest("r", [1], SamplingParams(seed=1, logprobs=0), TextStream(table, ("lo",)))
    told = [TokenLogprobs(-float(position), 1) for position in range(8)]
    output.apply_delta(TokenDelta("r", 1, 0, [*b"hell"], 1, 0, logprobs=told[:4]))
    output.apply_delta(TokenDelta("r", 1, 4, [*b"o yo"], 1, 0, logprobs=told[4:]))
    completion = output.completion()
    assert (completion.text, completion.token_ids, completion.logprobs) == ("hel", [*b"hello"], told[:5])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.1),
        ("frequency_penalty", "much"),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("nan")),
        ("repetition_penalty", 11),
        ("logit_bias", {-1: 0}),
        ("logit_bias", {"5": 0}),
        ("logit_bias", {5: 101}),
        ("logit_bias", [5]),
        ("logit_bias", dict.fromkeys(range(1025), 0)),
        ("bad_words", "word"),
        ("bad_words", ["x"] * 129),
        ("logprobs", -1),
        ("logprobs", True),
        ("prompt_logprobs", 21),
    ],
)
def test_a_bad_value_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field) as raised:
        SamplingOptions(**{field: value})  # type: ignore[arg-type]
    assert raised.value.param == field


@pytest.mark.parametrize("words", [[""], ["  "], [5], ["x" * 129]])
def test_a_bad_word_that_is_none_is_named_by_its_place(words: list[object]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingOptions(bad_words=["ok", *words])  # type: ignore[list-item]
    assert raised.value.param == "bad_words[1]"


def test_a_bias_for_a_token_that_does_not_exist_is_refused(model: PreparedModel) -> None:
    with LLM.from_runner(model, Overhearing(), CONFIG) as llm, pytest.raises(InvalidRequest) as raised:
        llm.generate([1], SamplingOptions(logit_bias={VOCAB: 1}))
    assert raised.value.param == "logit_bias"
