from pathlib import Path

import gguf
import numpy as np
import pytest

from onward.errors import StartupError
from onward.kernels import numpy_reference
from onward.kernels.block_packing import pack_blocks
from onward.kernels.weight_formats import BLOCK_FORMATS
from onward.models.loader.gguf_file import GgufFile, is_dequantizable
from onward.models.rope_scaling import llama3_divisors
from onward.models.tensor_names import LM_HEAD, expected_tensors
from onward.proto.model import Llama3Rope
from tests.models.checkpoints import VARIANTS, random_tensors, tiny_config, write_gguf

Kind = gguf.GGMLQuantizationType
REFUSED = [kind for kind in Kind if kind.name.startswith(("IQ1", "IQ2", "IQ3"))]
DEQUANTIZABLE = [kind for kind in Kind if is_dequantizable(kind) and kind not in REFUSED]


def random_valid_blocks(kind: Kind, num_rows: int, row_size: int, seed: int) -> np.ndarray:
    """Random bytes, but for blocks whose scales happen to be infinite or not a number."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    wanted = num_rows * row_size // block_size
    blocks = np.empty((0, block_bytes), dtype=np.uint8)
    for _ in range(100):
        drawn = generator.integers(0, 256, (2 * wanted, block_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            values = gguf.dequantize(drawn, kind).reshape(2 * wanted, -1)
        blocks = np.concatenate([blocks, drawn[np.isfinite(values).all(axis=1)]])
        if len(blocks) >= wanted:
            return blocks[:wanted].reshape(num_rows, -1)
    raise AssertionError(f"no valid blocks of {kind.name} found")


@pytest.mark.parametrize(("architecture", "tied"), VARIANTS)
def test_every_tensor_of_each_architecture_comes_back(tmp_path: Path, architecture: str, tied: bool) -> None:
    config = tiny_config(architecture, tie_word_embeddings=tied)
    tensors = random_tensors(config)
    file = GgufFile(write_gguf(tmp_path / "model.gguf", config, tensors))
    assert file.config == config
    assert set(file) == set(tensors)
    assert (LM_HEAD in file) is not tied
    for name, array in tensors.items():
        np.testing.assert_array_equal(file[name], array, err_msg=name)


def test_the_package_can_dequantize_the_usual_types() -> None:
    """So that an empty list cannot make the next test pass."""
    usual = {Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K, Kind.MXFP4, Kind.IQ4_NL}
    assert usual <= set(DEQUANTIZABLE)
    assert len(DEQUANTIZABLE) >= 16


@pytest.mark.parametrize("kind", DEQUANTIZABLE, ids=lambda kind: kind.name)
def test_random_blocks_of_each_type_are_dequantized_as_the_package_does_it(tmp_path: Path, kind: Kind) -> None:
    config = tiny_config("llama", hidden_size=256, intermediate_size=512, num_layers=1, num_heads=4, head_dim=64)
    q_name, down_name = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"
    q_blocks = random_valid_blocks(kind, 256, 256, seed=1)
    down_blocks = random_valid_blocks(kind, 256, 512, seed=2)
    path = write_gguf(
        tmp_path / "model.gguf",
        config,
        random_tensors(config),
        raw={q_name: (q_blocks, kind), down_name: (down_blocks, kind)},
    )
    file = GgufFile(path)
    np.testing.assert_array_equal(file[down_name], gguf.dequantize(down_blocks, kind).reshape(256, 512))
    interleaved = gguf.dequantize(q_blocks, kind).reshape(4, 32, 2, 256)
    np.testing.assert_array_equal(
        file[q_name].reshape(4, 2, 32, 256), np.stack([interleaved[:, :, 0], interleaved[:, :, 1]], axis=1)
    )
    assert file[down_name].dtype == np.float32
    assert file.is_quantized == (kind not in (Kind.F32, Kind.F16, Kind.BF16))


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.name)
def test_types_whose_blocks_are_indices_into_tables_are_refused_by_name(tmp_path: Path, kind: Kind) -> None:
    config = tiny_config("llama", hidden_size=256, intermediate_size=512, num_layers=1, num_heads=4, head_dim=64)
    name = "model.layers.0.mlp.down_proj.weight"
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.zeros((256, 512 // block_size * block_bytes), np.uint8)
    path = write_gguf(tmp_path / "model.gguf", config, random_tensors(config), raw={name: (blocks, kind)})
    with pytest.raises(StartupError, match=rf"blk\.0\.ffn_down\.weight has the type {kind.name}, .*not supported"):
        GgufFile(path)


@pytest.mark.parametrize("name", [*BLOCK_FORMATS, "IQ4_NL", "IQ4_XS"])
def test_matrices_in_blocks_keep_their_bits_and_the_order_of_their_rows(tmp_path: Path, name: str) -> None:
    kind = Kind[name]
    config = tiny_config("llama", hidden_size=256, intermediate_size=512, num_layers=1, num_heads=4, head_dim=64)
    names = [f"model.layers.0.{part}_proj.weight" for part in ("self_attn.q", "self_attn.k", "mlp.down")]
    shapes = expected_tensors(config)
    raw = {tensor: (random_valid_blocks(kind, *shapes[tensor], seed=index), kind) for index, tensor in enumerate(names)}
    file = GgufFile(write_gguf(tmp_path / "model.gguf", config, random_tensors(config), raw=raw))
    assert set(file.blocks) == set(names)
    for tensor in names:
        found = file.blocks[tensor]
        packed = pack_blocks(found.format_name, found.rows, tensor)
        np.testing.assert_array_equal(numpy_reference.weights(packed), file[tensor])


def test_a_type_that_cannot_be_dequantized_is_named(tmp_path: Path) -> None:
    config = tiny_config()
    name = "model.norm.weight"
    blocks = np.zeros(config.hidden_size, dtype=np.int32)
    path = write_gguf(tmp_path / "model.gguf", config, random_tensors(config), raw={name: (blocks, Kind.I32)})
    with pytest.raises(StartupError, match=r"output_norm\.weight has the type I32"):
        GgufFile(path)


def test_llama3_rope_scaling_is_found_in_its_tensor(tmp_path: Path) -> None:
    scaling = Llama3Rope(32.0, 1.0, 4.0, 8192)
    config = tiny_config(head_dim=64, rope_theta=500000.0, rope_scaling=scaling)
    divisors = np.asarray(llama3_divisors(scaling, 500000.0, 64), dtype=np.float32)
    path = write_gguf(tmp_path / "model.gguf", config, random_tensors(config), extra={"rope_freqs.weight": divisors})
    assert GgufFile(path).config == config


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = random_tensors(config)
    extra = {"blk.0.attn_rot_embd.weight": np.zeros(4, dtype=np.float32)}
    path = write_gguf(tmp_path / "extra.gguf", config, tensors, extra=extra)
    with pytest.raises(StartupError, match=r"blk\.0\.attn_rot_embd\.weight"):
        GgufFile(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    path = write_gguf(tmp_path / "missing.gguf", config, tensors)
    with pytest.raises(StartupError, match=r"lacks .*model\.layers\.1\.mlp\.up_proj\.weight"):
        GgufFile(path)


def test_a_tensor_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = random_tensors(config) | {"model.norm.weight": np.zeros(31, dtype=np.float32)}
    with pytest.raises(StartupError, match=r"model\.norm\.weight has the shape \[31\], expected \[32\]"):
        GgufFile(write_gguf(tmp_path / "model.gguf", config, tensors))


def test_a_file_whose_data_are_cut_short_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    path = write_gguf(tmp_path / "model.gguf", config, random_tensors(config))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(StartupError, match="cut short"):
        GgufFile(path)
