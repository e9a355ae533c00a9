"""`onward.LLM` over the hash model: what a caller gets, whatever happens inside."""

from pathlib import Path

import pytest

from onward.config import EngineConfig
from onward.errors import InvalidRequest, OnwardError, Unavailable
from onward.llm import LLM, Completion, SamplingOptions
from onward.offline.output import OfflineRequest
from onward.proto.engine import TokenDelta
from onward.proto.model import ModelConfig, PreparedModel
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import AssignSlot, SlotFailed, StepPlan, StepResult
from onward.sim.hash_worker import HashWorker, expected_output
from tests.api import small_model
from tests.models import checkpoints

VOCAB = small_model.VOCAB_SIZE
PRINTABLE = 128
"""With so small a vocabulary the hash model writes ASCII."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return small_model.prepare(Path(tmp_path_factory.mktemp("small-model")))


def open_llm(model: PreparedModel, *, num_blocks: int = 256, vocab_size: int = VOCAB, **config: int) -> LLM:
    worker = HashWorker(num_blocks, 16, vocab_size=vocab_size, max_model_len=256)
    return LLM.from_runner(model, worker, EngineConfig(**({"max_num_seqs": 8, "max_num_batched_tokens": 32} | config)))


def expected(prompt: list[int], options: SamplingOptions, vocab_size: int = VOCAB) -> list[int]:
    sampling = options.to_sampling([small_model.EOS])
    assert options.max_tokens is not None
    return expected_output(prompt, sampling, options.max_tokens, vocab_size)


def check_idle(llm: LLM) -> None:
    llm._engine.audit_idle()


GREEDY = SamplingOptions(max_tokens=20, temperature=0, ignore_eos=True)


def test_each_prompt_gets_its_own_completion_in_order(model: PreparedModel) -> None:
    prompts = [[n, n + 1, n + 2] for n in range(30)]
    with open_llm(model) as llm:
        completions = llm.generate(prompts, GREEDY)
        check_idle(llm)
    assert [one.prompt_token_ids for one in completions] == prompts
    assert [one.token_ids for one in completions] == [expected(prompt, GREEDY) for prompt in prompts]
    assert {one.finish_reason for one in completions} == {"length"}


def test_one_prompt_may_be_a_text_or_its_token_ids(model: PreparedModel) -> None:
    with open_llm(model) as llm:
        [from_text] = llm.generate("hello", GREEDY)
        [from_ids] = llm.generate([*b"hello"], GREEDY)
    assert from_text.token_ids == from_ids.token_ids == expected([*b"hello"], GREEDY)


def test_a_completion_has_the_text_of_its_tokens(model: PreparedModel) -> None:
    with open_llm(model, vocab_size=PRINTABLE) as llm:
        [completion] = llm.generate("hello", GREEDY)
    assert completion.text == bytes(completion.token_ids).decode()


def test_chat_renders_the_models_template(model: PreparedModel) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    with open_llm(model) as llm:
        [alone] = llm.chat(conversation, GREEDY)
        both = llm.chat([conversation, [{"role": "user", "content": "bye"}]], GREEDY)
    assert alone.prompt_token_ids == small_model.chat_prompt("hi")
    assert [one.prompt_token_ids for one in both] == [small_model.chat_prompt("hi"), small_model.chat_prompt("bye")]
    assert both[0].token_ids == alone.token_ids == expected(alone.prompt_token_ids, GREEDY)


def test_an_end_token_ends_the_text_and_is_not_shown(model: PreparedModel) -> None:
    plain = expected([1, 2, 3], GREEDY, PRINTABLE)
    options = SamplingOptions(max_tokens=20, temperature=0, stop_token_ids=[plain[6]])
    with open_llm(model, vocab_size=PRINTABLE) as llm:
        [completion] = llm.generate([1, 2, 3], options)
    end = plain.index(plain[6])
    assert (completion.token_ids, completion.finish_reason) == (plain[: end + 1], "stop")
    assert completion.text == bytes(plain[:end]).decode()


def test_a_stop_string_cuts_text_and_tokens_and_frees_everything(model: PreparedModel) -> None:
    text = bytes(expected([1, 2, 3], GREEDY, PRINTABLE)).decode()
    options = SamplingOptions(max_tokens=20, temperature=0, ignore_eos=True, stop=text[8:11])
    with open_llm(model, vocab_size=PRINTABLE) as llm:
        [completion] = llm.generate([1, 2, 3], options)
        check_idle(llm)
    assert (completion.text, completion.finish_reason) == (text[:8], "stop")
    assert len(completion.token_ids) == 11


def test_a_seed_decides_the_output_in_any_batch(model: PreparedModel) -> None:
    options = [SamplingOptions(max_tokens=12, seed=seed, ignore_eos=True) for seed in (1, 2, 3)]
    with open_llm(model) as llm:
        together = llm.generate([[5, 6]] * 3, options)
        alone = [llm.generate([5, 6], one)[0] for one in options]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert len({tuple(one.token_ids) for one in together}) == 3


def test_without_a_seed_two_outputs_differ(model: PreparedModel) -> None:
    with open_llm(model) as llm:
        first, second = llm.generate([[5, 6]] * 2, SamplingOptions(max_tokens=20, ignore_eos=True))
    assert first.token_ids != second.token_ids


def test_outputs_are_exact_when_the_pool_is_too_small_for_all(model: PreparedModel) -> None:
    options = SamplingOptions(max_tokens=60, temperature=0, ignore_eos=True)
    prompts = [[n] * 20 for n in range(8)]
    with open_llm(model, num_blocks=12) as llm:
        completions = llm.generate(prompts, options)
        check_idle(llm)
    assert [one.token_ids for one in completions] == [expected(prompt, options) for prompt in prompts]


def test_a_repeated_prompt_says_how_much_of_it_was_cached(model: PreparedModel) -> None:
    prompt = list(range(40))
    with open_llm(model) as llm:
        assert [llm.generate(prompt, GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 32]


def test_a_stream_gives_the_same_text_and_tokens_as_a_batch(model: PreparedModel) -> None:
    with open_llm(model) as llm:
        pieces = list(llm.stream("hello", GREEDY))
        [completion] = llm.generate("hello", GREEDY)
    assert "".join(piece.text for piece in pieces) == completion.text
    assert [piece.num_tokens for piece in pieces] == list(range(1, 21))
    assert [piece.finish_reason for piece in pieces] == [None] * 19 + ["length"]


def test_a_stream_that_is_closed_leaves_nothing_behind(model: PreparedModel) -> None:
    with open_llm(model) as llm:
        stream = llm.stream("hello", GREEDY)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        check_idle(llm)


def test_streams_and_batches_may_be_open_side_by_side(model: PreparedModel) -> None:
    with open_llm(model) as llm:
        first, second = llm.stream([1], GREEDY), llm.stream([2], GREEDY)
        texts = [next(first).text, next(second).text]
        [batch] = llm.generate([3], GREEDY)
        texts = [texts[0] + "".join(p.text for p in first), texts[1] + "".join(p.text for p in second)]
        assert texts == [one.text for one in llm.generate([[1], [2]], GREEDY)]
    assert batch.token_ids == expected([3], GREEDY)


class InterruptedWorker(HashWorker):
    """Ctrl-C arrives while a step is running: its memory is half written."""

    interrupt_at: int | None = None

    def step(self, plan: StepPlan) -> StepResult:
        if plan.step == self.interrupt_at:
            self.interrupt_at = None
            super().step(plan)
            raise KeyboardInterrupt
        return super().step(plan)


def test_an_interrupted_batch_is_given_up_and_open_streams_go_on_exactly(model: PreparedModel) -> None:
    worker = InterruptedWorker(256, 16, vocab_size=VOCAB, max_model_len=256)
    with LLM.from_runner(model, worker, EngineConfig(max_num_seqs=8, max_num_batched_tokens=32)) as llm:
        stream = llm.stream([1, 2, 3], GREEDY)
        begun = [next(stream) for _ in range(4)]
        worker.interrupt_at = 8
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[4, 5]] * 3, GREEDY)
        pieces = begun + list(stream)
        [again] = llm.generate([1, 2, 3], GREEDY)
        check_idle(llm)
    assert worker.interrupt_at is None
    assert [piece.num_tokens for piece in pieces] == list(range(1, 21))
    assert "".join(piece.text for piece in pieces) == again.text
    assert again.token_ids == expected([1, 2, 3], GREEDY)


def test_ctrl_c_while_tokens_are_handed_out_costs_no_other_stream_a_token(
    model: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted: list[str] = []
    take = OfflineRequest.apply_delta

    def take_or_be_interrupted(output: OfflineRequest, delta: TokenDelta) -> None:
        if output.prompt_token_ids == [1, 2, 3] and not interrupted:
            interrupted.append(output.request_id)
            raise KeyboardInterrupt
        take(output, delta)

    with LLM.from_runner(model, HashWorker(256, 16, vocab_size=VOCAB, max_model_len=256)) as llm:
        early, late = llm.stream([1, 2, 3], GREEDY), llm.stream([7, 8], GREEDY)
        begun = [next(early).text], [next(late).text]
        monkeypatch.setattr(OfflineRequest, "apply_delta", take_or_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([4, 5], GREEDY)
        texts = [
            "".join([*first, *(piece.text for piece in rest)]) for first, rest in zip(begun, (early, late), strict=True)
        ]
        whole = llm.generate([[1, 2, 3], [7, 8]], GREEDY)
        check_idle(llm)
    assert interrupted
    assert texts == [one.text for one in whole]


class PickyWorker(HashWorker):
    """Cannot compute prompts that begin with 13."""

    def step(self, plan: StepPlan) -> StepResult:
        bad = {a.slot: a for a in plan.assign if isinstance(a, AssignSlot) and a.token_ids[0] == 13}
        result = super().step(plan)
        events = [
            SlotFailed(event.slot, event.slot_epoch, "invalid_logits", "not a number") if event.slot in bad else event
            for event in result.events
        ]
        return StepResult(result.step, events)


def test_one_requests_fault_is_that_requests_fault(model: PreparedModel) -> None:
    worker = PickyWorker(256, 16, vocab_size=VOCAB, max_model_len=256)
    with LLM.from_runner(model, worker, EngineConfig(max_num_seqs=8, max_num_batched_tokens=32)) as llm:
        good, bad = llm.generate([[12, 1], [13, 1]], GREEDY)
    assert good.token_ids == expected([12, 1], GREEDY)
    assert bad.finish_reason == "error" and bad.error is not None and bad.error.code == "invalid_logits"


def test_a_closed_llm_says_so(model: PreparedModel) -> None:
    llm = open_llm(model)
    llm.close()
    with pytest.raises(Unavailable, match="closed"):
        llm.generate("hello")


def test_a_model_without_a_tokenizer_speaks_in_token_ids() -> None:
    config = ModelConfig("llama", VOCAB, 8, 16, 1, 1, 1, 8, 256, 1e-5, 1e4)
    bare = PreparedModel("bare", "", config, "float32", "none", "fp", [], None, None, None, None, [])
    with open_llm(bare) as llm:
        [completion] = llm.generate([1, 2], GREEDY)
        assert completion.token_ids == expected([1, 2], GREEDY)
        with pytest.raises(InvalidRequest, match="token ids"):
            llm.generate("hello")
        with pytest.raises(InvalidRequest, match="chat template"):
            llm.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([], "prompts: "),
        ("", "prompts: must not be empty"),
        (None, "prompts: "),
        (["a", ""], r"prompts\[1\]: must not be empty"),
        ([1, VOCAB], rf"prompts\[1\]: must be a token id between 0 and {VOCAB - 1} "),
        ([[1], [2, -1]], r"prompts\[1\]\[1\]: "),
        ([[1], []], r"prompts\[1\]: "),
        ([[1], 2.5], r"prompts\[1\]: "),
        ([[1, "2"]], r"prompts\[0\]\[1\]: "),
    ],
)
def test_a_bad_prompt_is_named(model: PreparedModel, prompts: object, said: str) -> None:
    with open_llm(model) as llm, pytest.raises(InvalidRequest, match=said) as raised:
        llm.generate(prompts)  # type: ignore[arg-type]
    assert raised.value.param == "prompts"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages: "),
        ("hi", "messages: "),
        ([[]], r"messages\[0\]: "),
        ([{"role": "user"}], r"messages\[0\].content: is required"),
        ([{"content": "hi"}], r"messages\[0\].role: "),
        ([[{"role": "user", "content": "a"}], [{"role": "king", "content": "b"}]], r"messages\[1\]\[0\].role: "),
        ([{"role": "user", "content": "a"}, "b"], r"messages\[1\]: "),
        ([{"role": "user", "content": [{"type": "image"}]}], r"messages\[0\].content"),
    ],
)
def test_a_bad_message_is_named(model: PreparedModel, messages: object, said: str) -> None:
    with open_llm(model) as llm, pytest.raises(InvalidRequest, match=said) as raised:
        llm.chat(messages)  # type: ignore[arg-type]
    assert raised.value.param == "messages"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2),
        ("seed", 2**63),
        ("min_tokens", -1),
        ("stop", ""),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
    ],
)
def test_a_bad_sampling_value_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field) as raised:
        SamplingOptions(**{field: value})  # type: ignore[arg-type]
    assert raised.value.param == field


def test_sampling_options_must_match_the_prompts(model: PreparedModel) -> None:
    with open_llm(model) as llm:
        for sampling in ([GREEDY], {"seed": 1}, [GREEDY, None]):
            with pytest.raises(InvalidRequest) as raised:
                llm.generate([[1], [2]], sampling)  # type: ignore[arg-type]
            assert raised.value.param == "sampling"


def test_more_output_than_fits_is_refused_by_how_much(model: PreparedModel) -> None:
    with open_llm(model) as llm, pytest.raises(InvalidRequest, match="exceed the context of 256 tokens by 6") as raised:
        llm.generate([1, 2], SamplingOptions(max_tokens=260))
    assert raised.value.param == "max_tokens"


def test_a_prompt_that_leaves_no_room_is_refused_by_its_place_in_the_list(model: PreparedModel) -> None:
    with open_llm(model) as llm, pytest.raises(InvalidRequest, match=r"\Aprompts\[1\]: .* 1 too long") as raised:
        llm.generate(["a", "b" * 256])
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "prompts[1]")


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"port": 1}, "port"),
        ({"block_size": 0}, "block_size"),
        ({"threads": "two"}, "threads"),
        ({"dtype": "float8"}, "dtype"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens"),
        ({"speculative": "ngram:0"}, "speculative"),
        ({"speculative": 4}, "speculative"),
        ({"speculative": "ngram:4", "device": "cuda"}, "speculative"),
        ({"model": ""}, "model"),
    ],
)
def test_a_bad_knob_is_named(knobs: dict[str, object], named: str) -> None:
    with pytest.raises(OnwardError, match=named) as raised:
        LLM(**knobs)  # type: ignore[arg-type]
    assert raised.value.param == named


def test_a_list_longer_than_the_queue_is_worked_off(model: PreparedModel) -> None:
    prompts = [[n % 50, n // 50] for n in range(100)]
    options = SamplingOptions(max_tokens=2, temperature=0, ignore_eos=True)
    with open_llm(model, max_queue=4, max_queue_tokens=1) as llm:
        completions: list[Completion] = llm.generate(prompts, options, show_progress=True)
        check_idle(llm)
    assert [one.token_ids for one in completions] == [expected(prompt, options) for prompt in prompts]


class WatchedWorker(HashWorker):
    """Keeps the prompts in the order in which they were begun."""

    begun: list[list[int]]

    def step(self, plan: StepPlan) -> StepResult:
        self.begun += [assign.token_ids for assign in plan.assign if isinstance(assign, AssignSlot)]
        return super().step(plan)


def test_prompts_are_begun_in_the_order_in_which_they_were_given(model: PreparedModel) -> None:
    prompts = [[n, n + 1, n + 2] for n in range(30)]
    worker = WatchedWorker(256, 16, vocab_size=VOCAB, max_model_len=256)
    worker.begun = []
    with LLM.from_runner(model, worker, EngineConfig(max_num_seqs=8, max_num_batched_tokens=32)) as llm:
        llm.generate(prompts, GREEDY)
    assert worker.begun == prompts


def test_options_say_everything_that_the_worker_needs() -> None:
    options = SamplingOptions(max_tokens=9, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, seed=7, min_tokens=2)
    assert options.to_sampling([3, 1]) == SamplingParams(7, 0, 0.5, 4, 0.9, 0.1, 9, 2, (1, 3))
    assert SamplingOptions(ignore_eos=True, stop_token_ids=[8]).to_sampling([3]).end_token_ids == (8,)


def test_tokens_behind_a_stop_string_are_not_part_of_the_output(model: PreparedModel) -> None:
    with open_llm(model) as llm:
        output = llm._create_request([1], "prompts", SamplingOptions(stop="lo"))
    output.apply_delta(TokenDelta("r", 1, 0, [*b"hello there"], 1, 0))
    assert output.completion() == Completion("hel", [*b"hello"], "stop", [1], 0)


def test_a_checkpoint_on_disk_is_loaded_and_computed_here(tmp_path: Path) -> None:
    config = checkpoints.tiny_config(head_dim=16)
    folder = checkpoints.write_folder(tmp_path / "tiny", config, checkpoints.random_tensors(config))
    options = SamplingOptions(max_tokens=8, temperature=0, ignore_eos=True)
    said: list[str] = []
    with LLM(
        str(folder),
        cache_dir=tmp_path / "cache",
        num_kv_blocks=16,
        max_num_seqs=4,
        progress=lambda message, fraction: said.append(message),
    ) as llm:
        together = llm.generate([[1, 2, 3], [4, 5], [1, 2, 3]], options)
        [alone] = llm.generate([4, 5], options)
        check_idle(llm)
    assert together[0].token_ids == together[2].token_ids != together[1].token_ids == alone.token_ids
    assert all(0 <= token_id < config.vocab_size for one in together for token_id in one.token_ids)
    assert "loading the model" in said
