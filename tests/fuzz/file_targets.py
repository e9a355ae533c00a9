"""What the author of a model's files can write: heads of weights, configs, tokenizers."""

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from onward.errors import ClientError, StartupError
from onward.models.loader import text_metadata
from onward.models.loader.config_parser import from_hf
from onward.models.loader.gguf_file import GgufFile
from onward.models.loader.safetensors_file import MappedTensors
from onward.models.tensor_names import expected_tensors
from onward.proto.model import ModelConfig
from onward.text.gguf_tokenizer import build_tokenizer
from onward.text.tokenizer import Tokenizer
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
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_bytes(data)
    text_metadata.read_folder_text_metadata(folder)
    config = from_hf(text_metadata.read_json(folder / "config.json"))
    assert len(expected_tensors(config)) < 1 << 16
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ModelConfig)
    assert told == config, "every process takes what the reader of the file has taken"


_HF = [
    {
        **hf_json(tiny_config(architecture)),
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "layer_types": ["full_attention"], "use_sliding_window": True, "sliding_window": None, "max_window_layers": 2,
        "eos_token": {"content": "</s>"}, "bos_token": "<s>", "eos_token_id": [2, 3],
        "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    }
    for architecture in ("llama", "qwen2", "qwen3")
]  # fmt: skip
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


TARGETS = [
    Target("gguf", byte_cases(_gguf_seeds()), _gguf, (StartupError,)),
    Target("safetensors", cases(_SAFETENSORS, _safetensors_case), _safetensors, (StartupError,)),
    Target("config", cases(_HF, _json), _config, (StartupError,)),
    Target("tokenizer", cases([_TOKENIZER], _json), _tokenizer, (StartupError, ClientError)),
]
