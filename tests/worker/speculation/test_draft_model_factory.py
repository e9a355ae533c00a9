"""From `--speculative draft:PATH:N` to a model that drafts: how it is loaded, and what is refused at the start."""

from pathlib import Path

import msgspec
import pytest

from onward.bench.model_shapes import write_tokenizer
from onward.errors import StartupError
from onward.proto.model import ModelConfig
from onward.worker.speculation.draft_model_proposer import create_draft_model_factory, vocabulary_difference
from tests.models.checkpoints import random_tensors, write_folder
from tests.worker import small_int8
from tests.worker.driver import prepared
from tests.worker.speculation.proposer_context import BLOCK_SIZE, NUM_BLOCKS, Tables, wish, worker_config

CONFIG = small_int8.CONFIG


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For converted models; the kernels' place was settled when they were imported."""
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "cache"))


def _folder(path: Path, config: ModelConfig) -> Path:
    return write_folder(path, config, random_tensors(config))


def test_a_folder_drafts_in_int8_and_its_memory_counts_for_each_block(tmp_path: Path) -> None:
    opening = create_draft_model_factory(str(_folder(tmp_path / "model", CONFIG)), worker_config())
    values = 2 * BLOCK_SIZE * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim
    assert values <= opening.bytes_per_block < 2 * values  # one byte each, and scales
    tables = Tables(prepared(CONFIG, quantization="int8"))
    tables.assign(0, [1, 2, 3])
    drafter = opening.create(tables.around)
    drafter.on_assign(0, 3, 0)
    assert len(drafter.propose([wish(0, 3, 4)])[0]) == 4


NOT_INT8 = msgspec.structs.replace(CONFIG, intermediate_size=CONFIG.intermediate_size + 16)
"""int8 groups 32 inputs."""


@pytest.mark.parametrize(
    "config", [CONFIG, msgspec.structs.replace(CONFIG, head_dim=16), NOT_INT8], ids=["int8", "padded int8", "float"]
)
def test_the_memory_that_counts_is_the_memory_that_is_taken(tmp_path: Path, config: ModelConfig) -> None:
    opening = create_draft_model_factory(str(_folder(tmp_path / "model", config)), worker_config())
    drafter = opening.create(Tables(prepared(CONFIG, quantization="int8")).around)
    assert opening.bytes_per_block * NUM_BLOCKS == drafter._kv.data.nbytes


def test_what_cannot_be_int8_drafts_in_floats(tmp_path: Path) -> None:
    opening = create_draft_model_factory(str(_folder(tmp_path / "model", NOT_INT8)), worker_config())
    values = 2 * BLOCK_SIZE * NOT_INT8.num_layers * NOT_INT8.num_kv_heads * NOT_INT8.head_dim
    assert opening.bytes_per_block == 4 * values
    tables = Tables(prepared(CONFIG, quantization="int8"))
    tables.assign(0, [1, 2, 3])
    drafter = opening.create(tables.around)
    drafter.on_assign(0, 3, 0)
    assert len(drafter.propose([wish(0, 3, 4)])[0]) == 4


def test_a_path_without_a_model_is_refused_with_the_flag_that_named_it(tmp_path: Path) -> None:
    with pytest.raises(StartupError) as refused:
        create_draft_model_factory(str(tmp_path / "nothing"), worker_config())
    assert refused.value.message.startswith(f"--speculative draft:{tmp_path / 'nothing'}: no such model")


def test_a_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    opening = create_draft_model_factory(
        str(_folder(tmp_path, msgspec.structs.replace(CONFIG, vocab_size=96))), worker_config()
    )
    tables = Tables(prepared(CONFIG, quantization="int8"))
    with pytest.raises(StartupError, match=r"--speculative draft:.* has 96 tokens, the served model's 97"):
        opening.create(tables.around)


def test_with_tokenizers_the_tokens_count_and_not_how_a_model_is_padded(tmp_path: Path) -> None:
    for name, size in (("one", 300), ("longer", 310)):
        (tmp_path / name).mkdir()
        write_tokenizer(tmp_path / name, size)
    served = msgspec.structs.replace(prepared(CONFIG), folder=str(tmp_path / "one"), tokenizer="tokenizer.json")
    padded = msgspec.structs.replace(CONFIG, vocab_size=320)
    family = msgspec.structs.replace(served, folder=str(tmp_path / "longer"), config=padded)
    assert vocabulary_difference(served, served) is None
    assert vocabulary_difference(family, served) is None
    text = (tmp_path / "one" / "tokenizer.json").read_text().replace('w30"', 'other30"')
    (tmp_path / "longer" / "tokenizer.json").write_text(text)
    assert vocabulary_difference(family, served) == "token 286 is b' other30' to it, and b' w30' to the served model"
