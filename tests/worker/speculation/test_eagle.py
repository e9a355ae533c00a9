"""EAGLE's draft layer against a plain one, whatever way the hidden states come; and what is refused at the start."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from onward.errors import StartupError
from onward.kernels import numpy_reference
from onward.kernels.cpu.threads import ThreadPool
from onward.models.loader.eagle_head import read_eagle_head
from onward.proto.model import ModelConfig, PreparedModel
from onward.proto.sampling_params import SamplingParams
from onward.worker.sampler import Sampler, SamplingRow
from onward.worker.speculation.eagle_proposer import EagleProposer, EagleProposerFactory, create_eagle_factory
from onward.worker.speculation.proposer import ComputedSpan
from tests.worker import small_int8
from tests.worker.driver import prepared
from tests.worker.speculation.plain_eagle import PlainEagle, random_head, write_head
from tests.worker.speculation.proposer_context import BLOCK_SIZE, NUM_BLOCKS, Tables, wish, worker_config

CONFIG = msgspec.structs.replace(small_int8.UNTIED, num_layers=1)
RANDOM = np.random.default_rng(17)
TENSORS = random_head(CONFIG)
VOCABULARY, HIDDEN = CONFIG.vocab_size, CONFIG.hidden_size
FLOATS = {
    "model.embed_tokens.weight": RANDOM.standard_normal((VOCABULARY, HIDDEN), np.float32),
    "lm_head.weight": RANDOM.standard_normal((VOCABULARY, HIDDEN), np.float32),
}
PACKED = {name: small_int8.arrays(small_int8.UNTIED)[name] for name in ("embed", "head")}


def _served(kind: str) -> tuple[PreparedModel, dict[str, np.ndarray], PlainEagle]:
    """A served model, of which only the two ends are asked; and the plain layer between the same ends."""
    if kind == "float":
        plain = PlainEagle(CONFIG, TENSORS, *FLOATS.values())
        return prepared(small_int8.UNTIED), FLOATS, plain
    ends = [numpy_reference.weights(array)[:VOCABULARY] for array in PACKED.values()]
    return prepared(small_int8.UNTIED, quantization="int8"), PACKED, PlainEagle(CONFIG, TENSORS, *ends)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("eagle"), CONFIG, TENSORS)


class _Bench:
    """An Eagle, and hidden states that a served model might have had."""

    def __init__(self, folder: Path, kind: str = "float") -> None:
        model, weights, self.plain = _served(kind)
        self.tables = Tables(model)
        opening = EagleProposerFactory(read_eagle_head(folder), self.tables.around.config, str(folder), weights)
        self.eagle: EagleProposer = opening.create(self.tables.around)

    def begin(self, slot: int, tokens: Sequence[int]) -> np.ndarray:
        """The slot's hidden states, one for each token."""
        self.tables.assign(slot, tokens, room=40)
        self.eagle.on_assign(slot, len(tokens), 0)
        return np.random.default_rng(len(tokens)).standard_normal((128, HIDDEN)).astype(np.float32)

    def pass_over(self, slot: int, hidden: np.ndarray, start: int, count: int, num_tokens: int) -> None:
        """Beside some rows of others, and one that was drafted and not accepted."""
        others = np.zeros((3, HIDDEN), np.float32)
        rows = np.concatenate([others, hidden[start : start + count], others[:1]])
        self.eagle.on_computed([ComputedSpan(slot, start, count, 3, num_tokens)], lambda: rows)


def _tokens(count: int) -> list[int]:
    return np.random.default_rng(count).integers(0, VOCABULARY, count).tolist()


@pytest.mark.parametrize("kind", ["float", "int8"])
@pytest.mark.parametrize("chunks", [[40], [1, 15, 1, 23], [16, 24]], ids=str)
def test_drafts_are_those_of_the_plain_layer_in_any_chunking(folder: Path, kind: str, chunks: list[int]) -> None:
    bench, tokens = _Bench(folder, kind), _tokens(41)
    hidden = bench.begin(2, tokens)
    start = 0
    for count in chunks:
        bench.pass_over(2, hidden, start, count, 41)
        start += count
    assert bench.eagle.propose([wish(2, 41, 4)]) == [bench.plain.drafts(tokens, hidden[:40], 4)]


def test_a_layer_without_a_bias_is_one_too(tmp_path: Path) -> None:
    tensors = random_head(CONFIG, bias=False, seed=5)
    bench, tokens = _Bench(write_head(tmp_path, CONFIG, tensors)), _tokens(20)
    hidden = bench.begin(0, tokens)
    bench.pass_over(0, hidden, 0, 19, 20)
    plain = PlainEagle(CONFIG, tensors, *FLOATS.values())
    assert bench.eagle.propose([wish(0, 20, 3)]) == [plain.drafts(tokens, hidden[:19], 3)]


@pytest.mark.parametrize("num_accepted", [0, 1, 3])
def test_drafting_goes_on_from_what_was_accepted(folder: Path, num_accepted: int) -> None:
    """What drafts left in the layer's KV is overwritten by the pairs that came true."""
    bench, tokens = _Bench(folder), _tokens(14)
    hidden = bench.begin(1, tokens)
    bench.pass_over(1, hidden, 0, 13, 14)
    for turn in range(6):
        drafts = bench.eagle.propose([wish(1, len(tokens), 3)])[0]
        assert drafts == bench.plain.drafts(tokens, hidden[: len(tokens) - 1], 3)
        new = [*drafts[:num_accepted], (drafts[-1] + 1 + turn) % VOCABULARY]
        bench.tables.grow(1, len(tokens), new)
        start, tokens = len(tokens) - 1, tokens + new
        bench.pass_over(1, hidden, start, 1 + num_accepted, len(tokens))


def test_the_noise_of_sampled_drafts_is_that_of_their_position(folder: Path) -> None:
    """The same logits, as if the prompt had ended earlier or later."""
    bench, tokens = _Bench(folder), _tokens(30)
    hidden = bench.begin(0, tokens)
    bench.pass_over(0, hidden, 0, 29, 30)
    sampling = SamplingParams(seed=5, temperature=100.0)
    drawn = {tuple(bench.eagle.propose([wish(0, 30, 1, sampling, num_prompt)])[0]) for num_prompt in range(1, 30)}
    assert len(drawn) > 10
    assert bench.eagle.propose([wish(0, 30, 1, sampling, 10)]) == bench.eagle.propose([wish(0, 30, 1, sampling, 10)])


def test_sampled_drafts_have_the_noise_that_the_served_model_would_have(folder: Path) -> None:
    bench, tokens = _Bench(folder), _tokens(30)
    hidden = bench.begin(0, tokens)
    bench.pass_over(0, hidden, 0, 29, 30)
    sampling, sampler = SamplingParams(seed=5, choice_index=3, temperature=50.0), Sampler(VOCABULARY, 1, ThreadPool(1))

    def draw(logits: np.ndarray, depth: int) -> int:
        [token] = sampler.sample(logits[None], [SamplingRow(sampling, 20 + depth)])
        assert token is not None
        return token

    assert bench.eagle.propose([wish(0, 30, 4, sampling, 10)]) == [bench.plain.drafts(tokens, hidden[:29], 4, draw)]


def test_nothing_is_drafted_behind_an_end(folder: Path) -> None:
    bench, tokens = _Bench(folder), _tokens(30)
    hidden = bench.begin(0, tokens)
    bench.pass_over(0, hidden, 0, 29, 30)
    says = bench.plain.drafts(tokens, hidden[:29], 4)
    ends = SamplingParams(seed=0, temperature=0.0, end_token_ids=(says[1],))
    assert bench.eagle.propose([wish(0, 30, 4, ends)]) == [says[: says.index(says[1]) + 1]]


def test_several_slots_draft_at_once_as_far_as_each_wishes(folder: Path) -> None:
    bench = _Bench(folder)
    lists = {slot: _tokens(9 + 8 * slot) for slot in range(4)}
    expected = {}
    for slot, tokens in lists.items():
        hidden = bench.begin(slot, tokens)
        bench.pass_over(slot, hidden, 0, len(tokens) - 1, len(tokens))
        expected[slot] = bench.plain.drafts(tokens, hidden[: len(tokens) - 1], 1 + slot)
    wishes = [wish(slot, len(lists[slot]), 1 + slot) for slot in (2, 0, 3, 1)]
    assert bench.eagle.propose(wishes) == [expected[one.slot] for one in wishes]


def test_a_prefix_that_it_has_computed_is_gone_on_from(folder: Path) -> None:
    bench, tokens = _Bench(folder), _tokens(50)
    hidden = bench.begin(0, tokens)
    bench.pass_over(0, hidden, 0, 49, 50)
    blocks = bench.tables.around.tables.ids[0, :2].tolist()
    bench.tables.assign(3, tokens, blocks=blocks)
    bench.eagle.on_assign(3, 50, 2 * BLOCK_SIZE)
    bench.pass_over(3, hidden, 32, 17, 50)
    assert bench.eagle.propose([wish(3, 50, 3)]) == [bench.plain.drafts(tokens, hidden[:49], 3)]


def test_a_block_that_another_slot_began_to_fill_is_no_prefix_any_more(folder: Path) -> None:
    """A slot that has the old tokens there again has them from a peer."""
    bench, tokens, other = _Bench(folder), _tokens(50), _tokens(40)
    bench.pass_over(0, bench.begin(0, tokens), 0, 49, 50)
    blocks = bench.tables.around.tables.ids[0, :2].tolist()
    bench.tables.assign(1, other, blocks=blocks)
    bench.eagle.on_assign(1, 40, 0)
    bench.pass_over(1, np.ones((128, HIDDEN), np.float32), 0, 10, 40)
    bench.tables.assign(2, tokens, blocks=blocks)
    bench.eagle.on_assign(2, 50, 2 * BLOCK_SIZE)
    bench.pass_over(2, np.ones((128, HIDDEN), np.float32), 32, 17, 50)
    assert bench.eagle.propose([wish(2, 50, 2)]) == [[]]


@pytest.mark.parametrize("num_computed", [32, 49])
def test_kv_of_a_peer_has_no_hidden_states_and_so_no_drafts(folder: Path, num_computed: int) -> None:
    bench, tokens = _Bench(folder), _tokens(50)
    bench.tables.assign(0, tokens)
    bench.eagle.on_assign(0, 50, num_computed)
    hidden = np.ones((128, HIDDEN), np.float32)
    bench.pass_over(0, hidden, num_computed, 50 - num_computed, 51)
    assert bench.eagle.propose([wish(0, 51, 2)]) == [[]]


def test_a_slot_whose_last_pass_is_not_known_gets_no_drafts(folder: Path) -> None:
    bench, tokens = _Bench(folder), _tokens(20)
    hidden = bench.begin(0, tokens)
    bench.pass_over(0, hidden, 0, 10, 20)
    assert bench.eagle.propose([wish(0, 20, 2)]) == [[]]


def test_its_memory_counts_for_each_block(folder: Path) -> None:
    opening = create_eagle_factory(str(folder), worker_config())
    assert opening.bytes_per_block >= 2 * 4 * BLOCK_SIZE * CONFIG.num_kv_heads * CONFIG.head_dim
    assert opening.bytes_per_block * NUM_BLOCKS == _Bench(folder).eagle._kv.data.nbytes


def _without(name: str) -> dict[str, np.ndarray]:
    return {key: array for key, array in TENSORS.items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (_without("fc.weight"), "lacks fc.weight"),
        (_without("layers.0.mlp.up_proj.weight"), "lacks layers.0.mlp.up_proj.weight"),
        (TENSORS | {"layers.1.mlp.up_proj.weight": TENSORS["fc.bias"]}, "has layers.1.mlp.up_proj.weight"),
        (TENSORS | {"fc.weight": TENSORS["fc.weight"][:, 1:]}, "fc.weight has the shape [64, 127], expected [64, 128]"),
        (TENSORS | {"fc.weight": TENSORS["fc.weight"].astype(np.int32)}, "fc.weight has the type I32, expected F16"),
    ],
    ids=["no fc", "no up_proj", "two layers", "wrong shape", "wrong type"],
)
def test_a_folder_that_is_no_draft_layer_is_refused_by_name_and_shape(
    tmp_path: Path, tensors: dict[str, np.ndarray], said: str
) -> None:
    write_head(tmp_path, CONFIG, {name: np.ascontiguousarray(array) for name, array in tensors.items()})
    with pytest.raises(StartupError) as refused:
        create_eagle_factory(str(tmp_path), worker_config())
    assert refused.value.message.startswith(f"--speculative eagle:{tmp_path}: ")
    assert said in refused.value.message


def test_a_folder_without_a_config_or_with_several_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--speculative eagle:.*no config\.json"):
        create_eagle_factory(str(tmp_path / "nowhere"), worker_config())
    with pytest.raises(StartupError, match="num_hidden_layers 2"):
        create_eagle_factory(str(write_head(tmp_path, CONFIG, TENSORS, num_layers=2)), worker_config())


@pytest.mark.parametrize(("field", "value"), [("hidden_size", 128), ("vocab_size", 98)])
def test_a_layer_of_another_model_is_refused(folder: Path, field: str, value: int) -> None:
    other: ModelConfig = msgspec.structs.replace(small_int8.UNTIED, **{field: value})
    tables = Tables(prepared(other))
    with pytest.raises(StartupError, match=f"--speculative eagle:.*{field}"):
        create_eagle_factory(str(folder), worker_config()).create(tables.around)
