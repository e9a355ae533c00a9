"""A worker of several ranks says, bit by bit, what a worker of one rank says: each result for its own reason.

Ranks share every product, so what is compared is logits of every family of models, and then tokens, logprobs and vectors
of requests that sample in every way there is.
"""

import functools
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from onward.errors import StartupError
from onward.models.loader.weights import open_weights
from onward.proto.model import Experts, ModelConfig
from onward.proto.sampling_params import SamplingParams
from onward.supervisor.rank_process import spawn_ranks
from onward.worker.speculation.ngram_proposer import NgramProposerFactory
from onward.worker.tensor_parallel.rank_group import RankGroup
from tests.kernels.exact_bits import differing
from tests.models.default_model import default_model, prompt_ids
from tests.worker import exact_int8, spoken
from tests.worker.batch_answers import KINDS, Answer, run_batch
from tests.worker.driver import Driver, prepared
from tests.worker.ranks import ranks_in_processes, ranks_in_threads
from tests.worker.speculation.drafted import generate, tokens_of
from tests.worker.speculation.texts import FIFTY, LISTS

NUM_TOKENS = 16
EVERY_KIND = [*KINDS.values(), SamplingParams(seed=0, pooling="mean"), SamplingParams(seed=0, pooling="last")]
FAMILIES = {
    "llama": {},
    "gpt2": {"norm": "layer", "learned_positions": True, "gated_mlp": False, "activation": "gelu_tanh"},
    "qwen2, float KV": {"architecture": "qwen2", "qkv_bias": True},
    "qwen3": {"architecture": "qwen3", "qk_norm": True},
    "untied": {"tie_word_embeddings": False},
    "experts": {"experts": Experts(6, 3, 96, shared_intermediate_size=64)},
}


def _driver_of_family(config: ModelConfig, num_threads: int = 1, ranks: RankGroup | None = None) -> Driver:
    return Driver(
        prepared(config, quantization="int8"), exact_int8.arrays(config), ranks=ranks, max_num_seqs=256,
        max_num_batched_tokens=256, num_kv_blocks=512, threads=num_threads,
        tensor_parallel=1 if ranks is None else ranks.size,
    )  # fmt: skip


def _run_until_all_ranks_have_joined(driver: Driver, ranks: RankGroup) -> None:
    """A rank that comes late is not waited for, so a step may have done without it. The time limit of the test is the
    bound."""
    while not all(ranks.num_joined()[1:]):
        driver.logits(63, [1] * 8, [8])


@pytest.mark.parametrize("name", FAMILIES)
def test_no_element_of_the_logits_differs_with_any_number_of_ranks(name: str) -> None:
    config = exact_int8.shape(32, 3, **FAMILIES[name])
    token_ids = exact_int8.tokens(131)
    alone = exact_int8.one_at_a_time(_driver_of_family(config), token_ids)
    for num_ranks, num_threads in ((2, 1), (3, 1), (2, 2)):
        ranks = ranks_in_threads(num_ranks, exact_int8.arrays(config))
        driver = _driver_of_family(config, num_threads, ranks)
        _run_until_all_ranks_have_joined(driver, ranks)
        for path in (exact_int8.in_chunks(131), exact_int8.in_chunks(1, 13, 65), exact_int8.mixed_with_others):
            assert differing(path(driver, token_ids), alone) == 0


def _driver_of_default_model(ranks: RankGroup | None, drafter: NgramProposerFactory | None = None) -> Driver:
    model = default_model("int8")
    return Driver(
        model, open_weights(model), spoken.AtOnce(), drafter, ranks=ranks, max_num_seqs=64, max_num_batched_tokens=1024,
        num_kv_blocks=1024, threads=1, tensor_parallel=1 if ranks is None else ranks.size,
    )  # fmt: skip


def _answers(num_ranks: int, prompts: list[str], given: list[list[int]] | None = None) -> list[Answer]:
    """Returns answers of the default model; request number i samples in way number i. `given` are tokens of the outputs."""
    with ranks_in_processes(num_ranks) as ranks:
        driver = _driver_of_default_model(ranks)
        requests = []
        for slot, text in enumerate(prompts):
            sampling = msgspec.structs.replace(EVERY_KIND[slot % len(EVERY_KIND)], seed=slot)
            prompt = prompt_ids(text)
            token_ids = [*prompt, *(given[slot] if given is not None else [])]
            requests.append(driver.assign(slot, token_ids, room=64, sampling=sampling, num_prompt=len(prompt)))
        answers = run_batch(driver, NUM_TOKENS, requests, [13, 7], 0)
        if ranks is not None:
            _run_until_all_ranks_have_joined(driver, ranks)
        return answers


@functools.cache
def _alone(num_prompts: int) -> list[Answer]:
    return _answers(1, FIFTY[:num_prompts])


def _check_resumed(num_ranks: int, num_prompts: int, num_given: int) -> None:
    """Outputs of one rank are continued by others."""
    whole = _alone(num_prompts)
    given = [answer.token_ids[:num_given] for answer in whole]
    for rest, answer in zip(_answers(num_ranks, FIFTY[:num_prompts], given), whole, strict=True):
        assert rest.token_ids == answer.token_ids[num_given:]
        assert rest.logprobs == answer.logprobs[num_given:]
        assert rest.vector == answer.vector


def test_every_kind_of_request_has_the_same_answer_from_two_ranks() -> None:
    num_prompts = len(EVERY_KIND)
    whole = _alone(num_prompts)
    assert any(answer.vector for answer in whole) and any(answer.of_given for answer in whole)
    assert len({tuple(answer.token_ids) for answer in whole}) > num_prompts // 2, "answers that are alike prove nothing"
    assert _answers(2, FIFTY[:num_prompts]) == whole


def test_an_output_of_one_rank_is_continued_by_four() -> None:
    _check_resumed(4, len(EVERY_KIND), 9)


def test_drafts_are_verified_by_all_ranks_as_by_one() -> None:
    def outputs(num_ranks: int, num_drafts: int) -> list[list[int]]:
        with ranks_in_processes(num_ranks) as ranks:
            driver = _driver_of_default_model(ranks, NgramProposerFactory() if num_drafts else None)
            requests = [
                driver.assign(slot, prompt_ids(text), room=64, sampling=SamplingParams(seed=slot, temperature=0.7))
                for slot, text in enumerate(LISTS)
            ]
            return [tokens_of(events) for events in generate(driver, requests, NUM_TOKENS, num_drafts)]

    assert outputs(2, 4) == outputs(1, 0)


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_fifty_prompts_with_every_kind_of_sampling_have_the_same_answers_from_all_numbers_of_ranks(
    num_ranks: int,
) -> None:
    assert _answers(num_ranks, FIFTY) == _alone(50)
    _check_resumed(num_ranks, 50, 5)


def test_a_rank_that_cannot_load_the_model_fails_the_start_and_says_why(tmp_path: Path) -> None:
    config = exact_int8.shape(32, 3)
    model = msgspec.structs.replace(prepared(config, quantization="int8"), folder=str(tmp_path), weights=["missing"])
    with ranks_in_processes(2) as ranks, pytest.raises(StartupError, match=r"rank 1: cannot read .*missing"):
        Driver(model, exact_int8.arrays(config), ranks=ranks, threads=1, tensor_parallel=2)


def test_the_reason_of_a_rank_is_reported_and_logged_while_another_rank_still_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = exact_int8.shape(32, 3)
    model = msgspec.structs.replace(prepared(config, quantization="int8"), folder=str(tmp_path), weights=["missing"])
    with spawn_ranks(3) as (processes, fds):
        processes[0].process.send_signal(signal.SIGSTOP)
        ranks = RankGroup([os.dup(fd) for fd in fds])
    with pytest.raises(StartupError, match=r"rank 2: cannot read .*missing"):
        Driver(model, exact_int8.arrays(config), ranks=ranks, threads=1, tensor_parallel=3)
    for one in processes:
        one.discard()
        assert one.process.returncode == -signal.SIGKILL, "a rank that has failed waits until it is killed"
    assert "the rank cannot start" in capfd.readouterr().err


def test_a_rank_that_runs_waits_until_it_is_killed_when_rank_0_is_gone() -> None:
    with spawn_ranks(2) as ([rank], [fd]):
        ranks, leader_end = RankGroup([os.dup(fd)]), socket.socket(fileno=os.dup(fd))
    with leader_end:
        _run_until_all_ranks_have_joined(_driver_of_default_model(ranks), ranks)
        leader_end.setblocking(True)
        leader_end.shutdown(socket.SHUT_WR)
        assert not leader_end.recv(1), "the rank has noticed the end of rank 0"
    rank.discard()
    assert rank.process.returncode == -signal.SIGKILL


def test_a_rank_that_dies_in_the_start_fails_the_start() -> None:
    config = exact_int8.shape(32, 3)
    with spawn_ranks(2) as ([rank], [fd]):
        ranks = RankGroup([os.dup(fd)])
    rank.discard()
    with pytest.raises(StartupError, match="rank 1 ended while it was starting"):
        _driver_of_family(config, ranks=ranks)


def test_a_rank_loads_neither_tokenizer_nor_grammars_nor_http() -> None:
    modules = {"tokenizers", "llguidance", "starlette", "uvicorn", "zmq", "jinja2", "torch"}
    code = f"import sys, onward.worker.tensor_parallel.rank_main; print(*({modules} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
