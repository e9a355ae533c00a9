"""The default model: float32 says what transformers says, int8 says the same bits under all circumstances."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from onward.config import DEFAULT_MODEL, cache_dir
from onward.models.loader.model_store import resolve_source
from onward.proto.step import RunSlot
from onward.worker.token_span import unowned_span
from tests.models.default_model import PROMPTS, default_model, driver, prompt_ids, tokenizer
from tests.models.evaluation_texts import texts
from tests.models.gguf_in_transformers import transformers_model
from tests.worker.driver import Driver

NUM_TOKENS = 64
# Float tests run on one thread: torch's threads wait for each other by spinning, which is slow beside anything else.


@pytest.fixture(scope="module")
def theirs() -> Any:
    """The same file through transformers."""
    torch.set_num_threads(1)
    source = resolve_source(
        DEFAULT_MODEL, with_weights=True, cache_dir=cache_dir(), progress=lambda message, fraction: None
    )
    return transformers_model(source.path)  # type: ignore[union-attr]


def _their_choices(theirs: Any, prompt: list[int], output: list[int]) -> list[int]:
    """What transformers would say after the prompt and each beginning of the output."""
    with torch.inference_mode():
        logits = theirs(torch.tensor([prompt + output[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


def _check_one_batch(theirs: Any, texts: list[str], num_tokens: int) -> None:
    ours = driver("none", max_model_len=128, max_num_seqs=len(texts), threads=1)
    prompts = [prompt_ids(text) for text in texts]
    requests = [ours.assign(i, prompt, room=num_tokens) for i, prompt in enumerate(prompts)]
    for prompt, output in zip(prompts, ours.generate(requests, num_tokens), strict=True):
        assert _their_choices(theirs, prompt, output) == output


def test_float32_says_in_one_batch_what_transformers_says(theirs: Any) -> None:
    _check_one_batch(theirs, PROMPTS[:8], 32)


@pytest.mark.full
def test_float32_says_64_tokens_for_each_of_many_prompts_in_one_batch_like_transformers(theirs: Any) -> None:
    _check_one_batch(theirs, PROMPTS, NUM_TOKENS)


def test_float32_says_the_same_alone(theirs: Any) -> None:
    ours = driver("none", max_model_len=128, max_num_seqs=1, threads=1)
    prompt = prompt_ids(PROMPTS[0])
    output = ours.generate([ours.assign(0, prompt, room=NUM_TOKENS)], NUM_TOKENS)[0]
    assert _their_choices(theirs, prompt, output) == output


@pytest.mark.full
def test_float32_says_the_same_alone_for_every_prompt(theirs: Any) -> None:
    ours = driver("none", max_model_len=128, max_num_seqs=1, threads=1)
    for index, text in enumerate(PROMPTS):
        prompt = prompt_ids(text)
        request = ours.assign(0, prompt, room=NUM_TOKENS)
        output = ours.generate([request], NUM_TOKENS)[0]
        ours.give_back(request.block_ids)
        assert _their_choices(theirs, prompt, output) == output
        if index < 3:  # that the choices are what it would generate needs no proof for each
            assert _their_output(theirs, prompt) == output


def _their_output(theirs: Any, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        generated = theirs.generate(
            torch.tensor([prompt]), do_sample=False, min_new_tokens=NUM_TOKENS, max_new_tokens=NUM_TOKENS,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return generated[0, len(prompt) :].tolist()


def _text_ids(count: int) -> list[int]:
    return tokenizer().encode(texts()["code"]).ids[:count]


@pytest.fixture(scope="module")
def alone() -> np.ndarray:
    """Logits of a text in one piece, on two threads, alone in the batch."""
    return driver("int8", max_num_seqs=100, threads=2).logits(0, _text_ids(100), [100])


@pytest.mark.parametrize("chunks", [[1] * 100, [50, 50], [16, 17, 1, 66], [99, 1]], ids=lambda c: f"{len(c)}-chunks")
def test_int8_logits_are_the_same_bits_in_any_chunking(alone: np.ndarray, chunks: list[int]) -> None:
    np.testing.assert_array_equal(driver("int8", max_num_seqs=100).logits(3, _text_ids(100), chunks), alone)


def test_int8_logits_are_the_same_bits_on_one_thread(alone: np.ndarray) -> None:
    one = driver("int8", max_num_seqs=100, threads=1)
    np.testing.assert_array_equal(one.logits(0, _text_ids(100), [60, 40]), alone)


@pytest.mark.parametrize("block_size", [32, 64])
def test_int8_logits_are_the_same_bits_with_other_block_sizes(alone: np.ndarray, block_size: int) -> None:
    other = driver("int8", max_num_seqs=100, block_size=block_size)
    np.testing.assert_array_equal(other.logits(0, _text_ids(100), [100]), alone)


def test_int8_logits_are_the_same_bits_in_any_batch(alone: np.ndarray) -> None:
    """Beside others that come, go and prefill, in batches of random make-up."""
    many = driver("int8", max_num_seqs=128)
    choose = random.Random(11)
    others = [many.assign(slot, _text_ids(500)[7 * slot :][:90]) for slot in range(1, 20)]
    watched = many.assign(0, _text_ids(100))
    many.step(assign=[watched, *others])
    done = dict.fromkeys(range(20), 0)
    while done[0] < 100:
        spans = []
        for slot in choose.sample(range(20), choose.randint(1, 20)):
            count = min(choose.choice([1, 1, 1, 2, 5, 9, 17]), (100 if slot == 0 else 90) - done[slot])
            if count > 0 and sum(span.count for span in spans) + count <= 128:
                spans.append(unowned_span(slot, done[slot], count, is_sampled=True))
                done[slot] += count
        if not spans:
            continue
        logits = many.runner.compute_logits(spans)
        row = 0
        for span in spans:
            if span.slot == 0:
                np.testing.assert_array_equal(logits[row : row + span.count], alone[span.start :][: span.count])
            row += span.count


@pytest.mark.parametrize("num_shared", [16, 48, 96])
def test_int8_logits_are_the_same_bits_after_a_prefix_hit(alone: np.ndarray, num_shared: int) -> None:
    ours: Driver = driver("int8", max_num_seqs=100)
    token_ids = _text_ids(100)
    first = ours.assign(0, token_ids)
    ours.step(assign=[first], run=[RunSlot(0, first.slot_epoch, 100)])
    blocks = first.block_ids[: num_shared // 16] + ours.blocks_for(100 - num_shared)
    ours.step(assign=[ours.assign(9, token_ids, blocks=blocks, num_computed=num_shared)])
    logits = ours.runner.compute_logits([unowned_span(9, num_shared, 100 - num_shared, is_sampled=True)])
    np.testing.assert_array_equal(logits, alone[num_shared:])


@pytest.mark.full
def test_int8_is_as_good_as_float32_on_prose_code_and_chat() -> None:
    pieces = [ids for text in texts().values() for ids in _pieces(text, 512, 2_048)]
    assert sum(map(len, pieces)) >= 4_000
    exact, ours = _evaluate("none", pieces), _evaluate("int8", pieces)
    perplexity_ratio = np.exp(exact.log_likelihood - ours.log_likelihood)
    agreement = np.mean(exact.choices == ours.choices)
    print(f"\nint8 against float32: perplexity x {perplexity_ratio:.4f}, top-1 agreement {agreement:.4f}")
    assert perplexity_ratio < 1.015
    assert agreement >= 0.95


def _pieces(text: str, length: int, at_most: int) -> list[list[int]]:
    ids = tokenizer().encode(text).ids[:at_most]
    return [ids[i : i + length] for i in range(0, len(ids), length)]


class _Evaluation:
    def __init__(self) -> None:
        self.choices: np.ndarray = np.empty(0, np.int64)
        self._log_likelihoods: np.ndarray = np.empty(0)

    def add(self, logits: np.ndarray, token_ids: list[int]) -> None:
        wide = logits[:-1].astype(np.float64)
        wide -= wide.max(-1, keepdims=True)
        wide -= np.log(np.exp(wide).sum(-1, keepdims=True))
        told = wide[np.arange(len(wide)), token_ids[1:]]
        self._log_likelihoods = np.append(self._log_likelihoods, told)
        self.choices = np.append(self.choices, logits.argmax(-1))

    @property
    def log_likelihood(self) -> float:
        return float(self._log_likelihoods.mean())


def _evaluate(quantization: str, pieces: list[list[int]]) -> _Evaluation:
    ours, result = driver(quantization, max_num_seqs=512), _Evaluation()
    for token_ids in pieces:
        result.add(ours.logits(0, token_ids, [len(token_ids)]), token_ids)
    return result


def test_the_default_model_is_quantized_unless_told_otherwise() -> None:
    assert default_model("auto").quantization == "int8"
