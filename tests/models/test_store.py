import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from onward.errors import StartupError
from onward.kernels import numpy_reference
from onward.models import fingerprint
from onward.models.loader.dummy_weights import DummyWeights
from onward.models.loader.model_store import MANIFEST, prepare
from onward.models.loader.safetensors_file import BFloat16Bits, write_file
from onward.models.loader.weights import open_weights
from onward.proto.model import PreparedModel
from tests.models.checkpoints import (
    GPT2_TOKENIZER,
    VARIANTS,
    int8_arrays,
    random_tensors,
    tiny_config,
    write_folder,
    write_gguf,
)
from tests.models.published_checkpoints import write_published

CONFIG = tiny_config(hidden_size=64, intermediate_size=128, head_dim=32)
TENSORS = random_tensors(CONFIG)


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", CONFIG, TENSORS, fields=GPT2_TOKENIZER)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def assert_weights_are(model: PreparedModel, tensors: dict[str, np.ndarray]) -> None:
    weights = open_weights(model)
    assert set(weights) == set(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(np.asarray(weights[name]), array, err_msg=name)


@pytest.mark.parametrize(("architecture", "tied"), VARIANTS)
def test_gguf_is_converted_to_the_same_weights(tmp_path: Path, cache: Path, architecture: str, tied: bool) -> None:
    config = tiny_config(architecture, tie_word_embeddings=tied)
    tensors = random_tensors(config)
    model = prepare(str(write_gguf(tmp_path / "m.gguf", config, tensors)), cache_dir=cache)
    assert (model.config, model.dtype, model.quantization) == (config, "float32", "none")
    assert_weights_are(model, tensors)


def test_gguf_brings_tokenizer_template_and_end_tokens(gguf_path: Path, cache: Path) -> None:
    model = prepare(str(gguf_path), cache_dir=cache)
    assert model.tokenizer is not None
    tokenizer = Tokenizer.from_file(str(Path(model.folder) / model.tokenizer))
    assert tokenizer.decode(tokenizer.encode("abc").ids) == "abc"
    assert model.chat_template == GPT2_TOKENIZER["tokenizer.chat_template"]
    assert (model.bos_token, model.eos_token, model.eos_token_ids) == ("<|im_start|>", "<|im_end|>", [2])


def test_gguf_without_a_vocabulary_is_a_model_of_token_ids(tmp_path: Path, cache: Path) -> None:
    model = prepare(str(write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS)), cache_dir=cache)
    assert model.tokenizer is None


def test_second_time_nothing_is_converted(gguf_path: Path, cache: Path) -> None:
    heard: list[str] = []
    first = prepare(str(gguf_path), cache_dir=cache, progress=lambda message, _: heard.append(message))
    assert "converting the weights" in heard
    heard.clear()
    second = prepare(str(gguf_path), cache_dir=cache, progress=lambda message, _: heard.append(message))
    assert second == first
    assert heard == []


def test_a_prepared_model_is_found_without_heavy_imports(gguf_path: Path, cache: Path) -> None:
    prepare(str(gguf_path), cache_dir=cache)
    script = (
        "import sys; from pathlib import Path; from onward.models.loader.model_store import prepare;"
        f"prepare({str(gguf_path)!r}, cache_dir=Path({str(cache)!r}));"
        "print([name for name in ('torch', 'numpy', 'gguf', 'numba', 'huggingface_hub') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


def test_a_quantized_model_is_found_without_torch_and_gguf(gguf_path: Path, cache: Path) -> None:
    prepare(str(gguf_path), quantization="int8", cache_dir=cache)
    script = (
        "import sys; from pathlib import Path; from onward.models.loader.model_store import prepare;"
        "from onward.models.loader.weights import open_weights;"
        f"model = prepare({str(gguf_path)!r}, quantization='int8', cache_dir=Path({str(cache)!r}));"
        "print(len(dict(open_weights(model))) > 0,"
        "[name for name in ('torch', 'gguf', 'numba', 'huggingface_hub') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "True []"


def test_a_changed_file_is_converted_anew(gguf_path: Path, cache: Path) -> None:
    first = prepare(str(gguf_path), cache_dir=cache)
    changed = random_tensors(CONFIG, seed=1)
    write_gguf(gguf_path, CONFIG, changed, fields=GPT2_TOKENIZER)
    os.utime(gguf_path, ns=(1, 1))
    second = prepare(str(gguf_path), cache_dir=cache)
    assert second.fingerprint != first.fingerprint
    assert_weights_are(second, changed)


def weights_file(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def cut_weights(folder: Path) -> None:
    os.truncate(weights_file(folder), weights_file(folder).stat().st_size // 2)


def remove_weights(folder: Path) -> None:
    weights_file(folder).unlink()


def break_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"name": 3}')


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize("damage", [cut_weights, remove_weights, break_manifest, remove_tokenizer])
def test_a_damaged_cache_is_rebuilt(gguf_path: Path, cache: Path, damage: Callable[[Path], None]) -> None:
    first = prepare(str(gguf_path), cache_dir=cache)
    damage(Path(first.folder))
    second = prepare(str(gguf_path), cache_dir=cache)
    assert msgspec.structs.replace(second, created_s=first.created_s) == first
    assert_weights_are(second, TENSORS)


def test_a_cache_that_was_moved_still_serves(gguf_path: Path, cache: Path, tmp_path: Path) -> None:
    prepare(str(gguf_path), cache_dir=cache)
    moved = tmp_path / "elsewhere"
    cache.rename(moved)
    assert_weights_are(prepare(str(gguf_path), cache_dir=moved), TENSORS)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gguf_is_stored_in_the_type_that_is_asked_for(gguf_path: Path, cache: Path, dtype: str) -> None:
    import torch

    model = prepare(str(gguf_path), dtype=dtype, cache_dir=cache)
    assert model.dtype == dtype
    weights = open_weights(model)
    for name, array in TENSORS.items():
        expected = torch.from_numpy(array).to(getattr(torch, dtype))
        assert torch.equal(torch.as_tensor(weights[name]), expected), name


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_float_checkpoint_is_used_where_it_lies(tmp_path: Path, cache: Path, num_shards: int) -> None:
    folder = write_folder(tmp_path / "tiny-llama", CONFIG, TENSORS, num_shards)
    model = prepare(str(folder), cache_dir=cache)
    assert (model.name, model.folder, len(model.weights)) == ("tiny-llama", str(folder), num_shards)
    assert (model.quantization, model.tokenizer, model.eos_token_ids) == ("none", None, [2])
    assert_weights_are(model, TENSORS)
    assert list(cache.rglob("*.safetensors")) == []


def _written(tmp_path: Path, name: str, default: str, others: dict[str, str]) -> str:
    """A GGUF file whose matrices are in one type, but for some."""
    matrices = [tensor for tensor, array in TENSORS.items() if array.ndim == 2]
    kinds = {tensor: gguf.GGMLQuantizationType[others.get(tensor, default)] for tensor in matrices}
    return str(write_gguf(tmp_path / f"{name}.gguf", CONFIG, TENSORS, quantized=kinds))


V_PROJ = "model.layers.0.self_attn.v_proj.weight"


def test_a_quantized_gguf_is_served_in_int8_with_the_bits_of_its_blocks(tmp_path: Path, cache: Path) -> None:
    path = _written(tmp_path, "mixed", "Q4_0", {V_PROJ: "Q8_0", "model.layers.1.mlp.up_proj.weight": "Q5_1"})
    quantized = prepare(path, cache_dir=cache)
    plain = prepare(path, quantization="none", cache_dir=cache)
    assert (quantized.quantization, plain.quantization) == ("int8", "none")
    assert quantized.fingerprint != plain.fingerprint
    assert quantized.weight_formats == ("Q4_0", "int8", "Q8_0")
    assert quantized.precision == "int8, weights in Q4_0, int8, Q8_0"
    expected = dict(open_weights(plain))
    arrays = open_weights(quantized)
    qkv = [numpy_reference.weights(np.asarray(arrays[name])) for name in ("layers.0.qkv", "layers.0.qkv.1")]
    parts = [expected[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    np.testing.assert_array_equal(np.concatenate(qkv), np.concatenate(parts))
    down = numpy_reference.weights(np.asarray(arrays["layers.1.down"]))
    np.testing.assert_array_equal(down, expected["model.layers.1.mlp.down_proj.weight"])
    embedding = numpy_reference.weights(np.asarray(arrays["embed"]))[: CONFIG.vocab_size]
    np.testing.assert_array_equal(embedding, expected["model.embed_tokens.weight"])


def test_the_fingerprint_depends_on_the_format_of_the_blocks(tmp_path: Path, cache: Path) -> None:
    paths = [_written(tmp_path, name, kind, others) for name, kind, others in
             (("a", "Q4_0", {}), ("b", "Q8_0", {}), ("c", "Q4_0", {V_PROJ: "Q8_0"}))]  # fmt: skip
    assert len({prepare(path, cache_dir=cache).fingerprint for path in paths}) == 3


def test_another_version_of_the_conversion_changes_the_fingerprint_and_converts_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with the same fingerprint takes over the KV of the old weights."""
    write_published(tmp_path / "quantized", CONFIG, "gptq-4")
    write_folder(tmp_path / "floats", CONFIG, TENSORS)
    folders = [str(tmp_path / name) for name in ("quantized", "floats")]
    before = [prepare(folder, cache_dir=cache) for folder in folders]
    monkeypatch.setattr(fingerprint, "CONVERSION_VERSION", fingerprint.CONVERSION_VERSION + 1)
    after = [prepare(folder, cache_dir=cache) for folder in folders]
    assert [one.fingerprint == other.fingerprint for one, other in zip(before, after, strict=True)] == [False, True]
    assert [one.folder == other.folder for one, other in zip(before, after, strict=True)] == [False, True]


def test_a_block_whose_scale_is_not_finite_is_refused_by_the_name_of_its_tensor(tmp_path: Path, cache: Path) -> None:
    blocks = np.zeros((64, 128 // 32 * 18), np.uint8)
    blocks[3, :2] = np.array([np.inf], np.float16).view(np.uint8)
    name = "model.layers.1.mlp.down_proj.weight"
    raw = {name: (blocks, gguf.GGMLQuantizationType.Q4_0)}
    path = write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS, raw=raw)
    with pytest.raises(StartupError, match=rf"{name} has a block whose scale is not finite"):
        prepare(str(path), cache_dir=cache)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_blocks_of_padded_heads_are_those_of_the_file_and_zeros(tmp_path: Path, cache: Path, architecture: str) -> None:
    config = tiny_config(architecture, hidden_size=64, intermediate_size=128, num_heads=4, head_dim=16)
    tensors = random_tensors(config)
    kinds = {name: gguf.GGMLQuantizationType.Q5_0 for name, array in tensors.items() if array.ndim == 2}
    path = str(write_gguf(tmp_path / "m.gguf", config, tensors, quantized=kinds))
    arrays = open_weights(prepare(path, cache_dir=cache))
    plain = open_weights(prepare(path, quantization="none", cache_dir=cache))
    expected = int8_arrays(config, {name: np.asarray(array) for name, array in plain.items()})
    for layer in range(config.num_layers):
        qkv, floats = (
            numpy_reference.weights(np.asarray(found[f"layers.{layer}.qkv"])) for found in (arrays, expected)
        )
        # The other one was quantized once more; zeros are zeros in both.
        np.testing.assert_allclose(qkv, floats, atol=0.02)
        assert ((qkv == 0) == (floats == 0)).mean() > 0.9 and not qkv.reshape(-1, 32, 64)[:, 16:].any()


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_float_checkpoint_is_quantized_into_the_cache(tmp_path: Path, cache: Path, num_shards: int) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, TENSORS, num_shards)
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    model = prepare(str(folder), quantization="int8", cache_dir=cache)
    assert (model.quantization, model.tokenizer) == ("int8", "tokenizer.json")
    assert_weights_are(model, int8_arrays(CONFIG, TENSORS))
    (folder / "chat_template.jinja").write_text("changed")
    assert prepare(str(folder), quantization="int8", cache_dir=cache).chat_template == "changed"


def test_a_bfloat16_checkpoint_is_quantized_from_its_float_values(tmp_path: Path, cache: Path) -> None:
    rounded = {name: BFloat16Bits.of(array) for name, array in TENSORS.items()}
    folder = write_folder(tmp_path / "m", CONFIG, TENSORS)
    write_file(folder / "model.safetensors", rounded)
    model = prepare(str(folder), quantization="int8", cache_dir=cache)
    assert_weights_are(model, int8_arrays(CONFIG, {name: bits.to_float32() for name, bits in rounded.items()}))


def test_dummy_weights_can_be_quantized(tmp_path: Path, cache: Path) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, TENSORS)
    (folder / "model.safetensors").unlink()
    model = prepare(str(folder), load_format="dummy", quantization="int8", cache_dir=cache)
    assert_weights_are(model, int8_arrays(CONFIG, DummyWeights(CONFIG)))


def test_sizes_that_int8_cannot_have_are_refused_by_name(tmp_path: Path, cache: Path) -> None:
    config = tiny_config(hidden_size=24, num_heads=3, num_kv_heads=1)
    folder = write_folder(tmp_path / "m", config, random_tensors(config))
    with pytest.raises(StartupError, match="hidden_size is 24"):
        prepare(str(folder), quantization="int8", cache_dir=cache)


def test_the_fingerprint_depends_on_weights_config_and_type(tmp_path: Path, cache: Path) -> None:
    folder = write_folder(tmp_path / "one", CONFIG, TENSORS)
    same = write_folder(tmp_path / "two", CONFIG, TENSORS)
    other_weights = write_folder(tmp_path / "three", CONFIG, random_tensors(CONFIG, seed=1))
    other_config = write_folder(tmp_path / "four", msgspec.structs.replace(CONFIG, rope_theta=5e4), TENSORS)
    prints = [prepare(str(path), cache_dir=cache).fingerprint for path in (folder, same, other_weights, other_config)]
    prints.append(prepare(str(folder), dtype="float16", cache_dir=cache).fingerprint)
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


def test_dummy_weights_need_only_a_config(tmp_path: Path, cache: Path) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, TENSORS)
    (folder / "model.safetensors").unlink()
    model = prepare(str(folder), load_format="dummy", cache_dir=cache)
    assert model.weights == []
    weights = open_weights(model)
    assert {name: array.shape for name, array in weights.items()} == {n: a.shape for n, a in TENSORS.items()}
    assert model.fingerprint == prepare(str(folder), load_format="dummy", cache_dir=cache).fingerprint


def test_dummy_weights_of_a_gguf_keep_its_tokenizer(gguf_path: Path, cache: Path) -> None:
    model = prepare(str(gguf_path), load_format="dummy", cache_dir=cache)
    assert (model.weights, model.tokenizer) == ([], "tokenizer.json")
    assert set(open_weights(model)) == set(TENSORS)
    assert model.fingerprint != prepare(str(gguf_path), cache_dir=cache).fingerprint


def test_clients_know_the_model_by_the_name_it_is_given(gguf_path: Path, cache: Path) -> None:
    assert prepare(str(gguf_path), cache_dir=cache).name == "tiny"
    assert prepare(str(gguf_path), served_model_names=["mine"], cache_dir=cache).name == "mine"
    assert prepare(str(gguf_path), cache_dir=cache).name == "tiny"


@pytest.mark.parametrize("model", ["nonsense", "./no/such/folder", "no-such.gguf", "a/b/c", "owner/file.gguf", ""])
def test_a_model_that_cannot_be_meant_is_refused(cache: Path, model: str) -> None:
    with pytest.raises(StartupError, match="no such model"):
        prepare(model, cache_dir=cache)


def test_a_file_of_another_kind_is_refused(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(StartupError, match=r"not a \.gguf"):
        prepare(str(tmp_path / "model.safetensors"), cache_dir=cache)


def test_a_folder_without_config_is_refused(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(StartupError, match=r"no config\.json"):
        prepare(str(tmp_path), cache_dir=cache)


@pytest.mark.parametrize("below", ["", "onward", "deeper/onward"])
def test_a_cache_that_cannot_be_written_is_reported_with_the_variable_that_names_another(
    gguf_path: Path, tmp_path: Path, below: str
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the cache folder should be")
    with pytest.raises(StartupError, match=r"the cache folder .*/blocked.* cannot be written.*; set ONWARD_CACHE to"):
        prepare(str(gguf_path), cache_dir=blocked / below)


def test_a_model_that_cannot_be_read_is_no_fault_of_the_cache(tmp_path: Path, cache: Path) -> None:
    folder = write_folder(tmp_path / "model", CONFIG, TENSORS)
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(StartupError, match=r"config\.json") as raised:
        prepare(str(folder), cache_dir=cache)
    assert "ONWARD_CACHE" not in raised.value.message


def test_the_manifest_describes_the_model_to_people(gguf_path: Path, cache: Path) -> None:
    model = prepare(str(gguf_path), cache_dir=cache)
    manifest = json.loads((Path(model.folder) / MANIFEST).read_text())
    assert manifest["name"] == "tiny"
    assert manifest["config"]["num_layers"] == CONFIG.num_layers


def test_a_cuda_device_has_its_own_types_and_its_own_fingerprint(gguf_path: Path, cache: Path) -> None:
    cpu = prepare(str(gguf_path), cache_dir=cache)
    cuda = prepare(str(gguf_path), device="cuda", cache_dir=cache)
    exact = prepare(str(gguf_path), device="cuda", deterministic=True, cache_dir=cache)
    narrow = prepare(str(gguf_path), device="cuda", quantization="fp8", cache_dir=cache)
    assert (cuda.dtype, cuda.quantization) == ("bfloat16", "none")
    assert (exact.is_deterministic, cuda.is_deterministic) == (True, False)
    assert narrow.quantization == "fp8"
    assert len({cpu.fingerprint, cuda.fingerprint, exact.fingerprint, narrow.fingerprint}) == 4
    assert list(open_weights(narrow)) == list(open_weights(cuda))


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"device": "cuda", "quantization": "int8"}, "--quantization int8 is for --device cpu"),
        ({"device": "cpu", "quantization": "fp8"}, "--quantization fp8 needs --device cuda"),
        ({"device": "cpu", "deterministic": True}, "--deterministic needs --device cuda"),
        ({"device": "cuda", "quantization": "fp8", "deterministic": True}, "does not go with --quantization fp8"),
        ({"device": "cuda", "dtype": "float32", "deterministic": True}, "does not go with --dtype float32"),
    ],
    ids=str,
)
def test_what_a_device_cannot_do_is_said(gguf_path: Path, cache: Path, asked: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        prepare(str(gguf_path), cache_dir=cache, **asked)


def test_a_template_file_takes_the_place_of_the_models_own(gguf_path: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("own: {{ messages[0].content }}")
    model = prepare(str(gguf_path), chat_template=str(tmp_path / "own.jinja"), cache_dir=cache)
    assert model.chat_template == "own: {{ messages[0].content }}"
    assert prepare(str(gguf_path), cache_dir=cache).chat_template == GPT2_TOKENIZER["tokenizer.chat_template"]


@pytest.mark.parametrize(("content", "named"), [(None, "cannot read"), (b"{% if %}", "broken"), (b"\xff", "UTF-8")])
def test_a_template_file_that_cannot_be_used_is_refused_first(
    tmp_path: Path, cache: Path, content: bytes | None, named: str
) -> None:
    path = tmp_path / "own.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StartupError, match=rf"--chat-template .*own\.jinja: .*{named}"):
        prepare("no-such-model", chat_template=str(path), cache_dir=cache)


@pytest.mark.parametrize("is_gguf", [True, False])
def test_a_context_that_the_model_has_not_is_refused_before_weights_are_read(
    tmp_path: Path, cache: Path, gguf_path: Path, is_gguf: bool
) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, TENSORS)
    heard: list[str] = []
    limit = CONFIG.max_position_embeddings
    with pytest.raises(StartupError, match=rf"--max-model-len {limit + 1} is not within the model's 1 to {limit}"):
        prepare(
            str(gguf_path if is_gguf else folder),
            max_model_len=limit + 1,
            cache_dir=cache,
            progress=lambda message, _: heard.append(message),
        )
    assert heard == [], "nothing was hashed or converted"


def test_a_revision_is_for_models_of_the_hub(gguf_path: Path, cache: Path) -> None:
    with pytest.raises(StartupError, match="--revision v1 is for a Hugging Face id"):
        prepare(str(gguf_path), revision="v1", cache_dir=cache)
