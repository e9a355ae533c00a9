"""What the author of a model's files can write: heads of weights, configs, tokenizers."""

import json
import struct
import tempfile
from base64 import b64encode
from pathlib import Path
from typing import Any

import msgspec

from onward.errors import ClientError, StartupError
from onward.models.loader import text_metadata
from onward.models.loader.config_parser import from_hf
from onward.models.loader.gguf_file import GgufFile
from onward.models.loader.safetensors_file import MappedTensors
from onward.models.loader.tokenizer_files import build_description, find_tokenizer
from onward.models.tensor_names import expected_tensors
from onward.proto.model import ModelConfig
from onward.text.gguf_tokenizer import build_tokenizer
from onward.text.tokenizer import Tokenizer
from onward.text.tokenizer_config import parse_tokenizer_config
from tests.fuzz.case import Target
from tests.fuzz.mutation import byte_cases, cases
from tests.models.checkpoints import GPT2_TOKENIZER, hf_json, random_tensors, tiny_config, write_gguf

_SHARED_MEMORY = Path("/dev/shm")
_FOLDER = tempfile.TemporaryDirectory(prefix="onward-fuzz-", dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None)
_PATH = Path(_FOLDER.name)


def _gguf_seeds() -> list[bytes]:
    """The data are left out but for a little: what is damaged is the head."""
    config = tiny_config(vocab_size=32, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, head_dim=4)
    seeds: list[bytes] = []
    spm = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "b", "ab"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    for fields in (GPT2_TOKENIZER, spm, {"general.alignment": 64}):
        path = write_gguf(_PATH / "seed.gguf", config, random_tensors(config), fields=fields)
        seeds.append(path.read_bytes())
    return seeds


def _gguf(data: bytes) -> None:
    path = _PATH / "case.gguf"
    path.write_bytes(data)
    file = GgufFile(path)
    text_metadata.read_gguf_text_metadata(file.metadata)
    if "tokenizer.ggml.model" in file.metadata:
        Tokenizer(build_tokenizer(file.metadata).to_str()).encode("ab a")
    for name in file:
        assert file[name].size


_SAFETENSORS = [
    {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}, "__metadata__": {"format": "pt"}},
    {
        "a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]},
        "b": {"dtype": "U8", "shape": [], "data_offsets": [8, 9]},
        "c": {"dtype": "BOOL", "shape": [7, 1], "data_offsets": [9, 16]},
    },
]


def _safetensors_case(tree: Any) -> bytes:
    text = json.dumps(tree).encode()
    return struct.pack("<Q", len(text)) + text + bytes(16)


def _safetensors(data: bytes) -> None:
    path = _PATH / "case.safetensors"
    path.write_bytes(data)
    for array in MappedTensors([path]).values():
        assert array is not None


def _config(data: bytes) -> None:
    folder = _PATH / "folder"
    folder.mkdir(exist_ok=True)
    of_model, of_text = _config_files(data)
    (folder / "config.json").write_bytes(of_model)
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_bytes(of_text)
    text_metadata.read_folder_text_metadata(folder)
    parse_tokenizer_config(text_metadata.read_json(folder / "tokenizer_config.json"))
    config = from_hf(text_metadata.read_json(folder / "config.json"))
    assert len(expected_tensors(config)) < 1 << 16
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ModelConfig)
    assert told == config, "every process takes what the reader of the file has taken"


def _config_files(data: bytes) -> tuple[bytes, bytes]:
    """What a case says of `config.json` and of the files about text. The same, where it does not say."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return data, data
    if not isinstance(tree, dict):
        return data, data
    return _json(tree.get("model", tree)), _json(tree.get("text", tree))


_TEXT = {
    "eos_token": {"content": "</s>"}, "bos_token": "<s>", "eos_token_id": [2, 3],
    "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    "added_tokens_decoder": {"3": {"content": "<x>", "special": True}}, "add_bos_token": True, "legacy": None,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
_LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
_WINDOWS = {
    "layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 64,
    "max_window_layers": 2,
}  # fmt: skip
_GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 48,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
}
_MODELS = [
    hf_json(tiny_config("llama")) | {"rope_scaling": _LLAMA3},
    hf_json(tiny_config("qwen2")) | {"rope_scaling": _YARN} | _WINDOWS,
    hf_json(tiny_config("qwen3")) | _WINDOWS,
    hf_json(tiny_config("llama"), architectures=["Phi3ForCausalLM"], sliding_window=64, rope_scaling=_LONG,
            original_max_position_embeddings=64),
    hf_json(tiny_config("llama"), architectures=["Gemma3ForCausalLM"], sliding_window=64, sliding_window_pattern=2,
            query_pre_attn_scalar=24, attn_logit_softcapping=5.0, rope_local_base_freq=1e3),
    _GPT2,
]  # fmt: skip
_HF = [{"model": model, "text": _TEXT} for model in _MODELS]
_TOKENIZER = json.loads(build_tokenizer(GPT2_TOKENIZER).to_str())


def _tokenizer(data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    tokenizer = Tokenizer(text)
    tokenizer.decode(tokenizer.encode("ab a<|im_end|>"))


def _json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def _sentencepiece_seed(model_type: int) -> bytes:
    """A model of a few pieces, without normalization."""

    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    def piece(text: str, score: float, kind: int) -> bytes:
        return field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([0x18, kind]))

    special = [piece("<unk>", 0, 2), piece("<s>", 0, 3), piece("</s>", 0, 3), piece("<x>", 0, 4)]
    bytes_of_text = [piece(f"<0x{byte:02X}>", 0, 6) for byte in (0x61, 0x62, 0xFF)]
    normal = [piece(text, -index, 1) for index, text in enumerate(("ab", "▁a", "a", "b", "▁"))]
    trainer = field(2, bytes([0x18, model_type, 0x98, 0x02, 1]))
    return b"".join([*special, *bytes_of_text, *normal, trainer, field(3, bytes([0x20, 0]))])


_RANKS = b"".join(b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)) + b"YWI= 256\n"


def _tokenizer_model(data: bytes) -> None:
    folder = _PATH / "tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(data)
    source = find_tokenizer(folder)
    assert source is not None
    description = build_description(source)
    assert description is not None
    tokenizer = Tokenizer(description)
    tokenizer.decode(tokenizer.encode("ab a<x> é<s>"))


TARGETS = [
    Target("gguf", byte_cases(_gguf_seeds()), _gguf, (StartupError,)),
    Target("safetensors", cases(_SAFETENSORS, _safetensors_case), _safetensors, (StartupError,)),
    Target("config", cases(_HF, _json), _config, (StartupError,)),
    Target(
        "tokenizer_model",
        byte_cases([_sentencepiece_seed(1), _sentencepiece_seed(2), _RANKS]),
        _tokenizer_model,
        (StartupError, ClientError),
    ),
    Target("tokenizer", cases([_TOKENIZER], _json), _tokenizer, (StartupError, ClientError)),
]
