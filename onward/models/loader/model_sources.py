"""Where a model comes from: a GGUF file or a folder in Hugging Face's layout. Both open to the same things.

Opening is the expensive part and happens only when a model is converted; what identifies a source is cheap to ask.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from onward.errors import StartupError
from onward.models.loader import checkpoint, generation_config, text_metadata
from onward.models.loader.bounded_read import read_json
from onward.models.loader.config_parser import from_hf
from onward.models.loader.file_property_cache import cached_property_of
from onward.models.loader.tokenizer_files import TOKENIZER, write_tokenizer
from onward.models.tensor_names import expected_tensors
from onward.proto.model import ModelConfig, SamplingDefaults
from onward.version import __version__

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class OpenedModel:
    config: ModelConfig
    read_text_metadata: Callable[[str | None], text_metadata.TextMetadata]
    """Takes the path of the tokenizer that was written."""
    open_tensors: "Callable[[], Mapping[str, np.ndarray]]"
    """float32, by canonical name, made when they are asked for."""
    write_tokenizer: Callable[[Path], str | None]
    """Puts `tokenizer.json` into a folder and returns its name, if the model has one."""


class ModelSource(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def weight_files(self) -> list[Path]: ...

    @property
    def other_files(self) -> list[Path]:
        """What else decides the prepared model."""
        ...

    def cached_config(self, cache_dir: Path) -> ModelConfig:
        """For checks before anything large is read. Raises if the model cannot be served."""
        ...

    def check_headers(self, cache_dir: Path) -> None:
        """Raises if the weights' files are not what they say. Comes first: to hash a file that claims to be huge, or to
        map it, would be work for nothing."""
        ...

    def is_quantized(self, cache_dir: Path) -> bool: ...

    def sampling_defaults(self) -> SamplingDefaults: ...

    def open(self) -> OpenedModel: ...


@dataclass(frozen=True, slots=True)
class GgufSource:
    path: Path
    name: str

    @property
    def weight_files(self) -> list[Path]:
        return [self.path]

    @property
    def other_files(self) -> list[Path]:
        return []

    def cached_config(self, cache_dir: Path) -> ModelConfig:
        self.check_headers(cache_dir)
        text = cached_property_of(self.path, f"config {__version__}", cache_dir, _gguf_config_json)
        try:
            return msgspec.json.decode(text, type=ModelConfig)
        except msgspec.DecodeError:  # kept by a program of another version
            return msgspec.json.decode(_gguf_config_json(self.path), type=ModelConfig)

    def check_headers(self, cache_dir: Path) -> None:
        cached_property_of(self.path, "head", cache_dir, _check_gguf_header)

    def is_quantized(self, cache_dir: Path) -> bool:
        return cached_property_of(self.path, "quantized", cache_dir, _gguf_is_quantized) == "yes"

    def sampling_defaults(self) -> SamplingDefaults:
        """Such files have none."""
        return SamplingDefaults()

    def open(self) -> OpenedModel:
        from onward.models.loader.gguf_file import GgufFile

        file = GgufFile(self.path)

        def write_tokenizer(folder: Path) -> str | None:
            if "tokenizer.ggml.model" not in file.metadata:
                return None
            from onward.text.gguf_tokenizer import build_tokenizer

            build_tokenizer(file.metadata).save(str(folder / TOKENIZER), pretty=False)
            return TOKENIZER

        return OpenedModel(
            file.config,
            lambda _: text_metadata.read_gguf_text_metadata(file.metadata),
            lambda: file,
            write_tokenizer,
        )


def _check_gguf_header(path: Path) -> str:
    from onward.models.loader.gguf_header import read_header

    return f"{len(read_header(path).tensors)} tensors"


def _gguf_config_json(path: Path) -> str:
    from onward.models.loader.gguf_file import GgufFile

    return msgspec.json.encode(GgufFile(path).config).decode()


def _gguf_is_quantized(path: Path) -> str:
    from onward.models.loader.gguf_file import GgufFile

    return "yes" if GgufFile(path).is_quantized else "no"


@dataclass(frozen=True, slots=True)
class FolderSource:
    folder: Path
    name: str

    @property
    def weight_files(self) -> list[Path]:
        return checkpoint.weight_files(self.folder)

    @property
    def other_files(self) -> list[Path]:
        return text_metadata.text_files(self.folder)

    def cached_config(self, cache_dir: Path) -> ModelConfig:
        return self.read_config()

    def check_headers(self, cache_dir: Path) -> None:
        config = self.read_config()
        checkpoint.check_checkpoint(self.weight_files, config, source=str(self.folder))

    def is_quantized(self, cache_dir: Path) -> bool:
        """Checkpoints in another project's quantized form are refused by `from_hf`."""
        return False

    def sampling_defaults(self) -> SamplingDefaults:
        return generation_config.read_sampling_defaults(self.folder)

    def read_config(self) -> ModelConfig:
        path = self.folder / "config.json"
        if not path.is_file():
            raise StartupError(f"{self.folder} is not a model folder: it has no config.json")
        return from_hf(read_json(path))

    def open(self) -> OpenedModel:
        config = self.read_config()
        return OpenedModel(
            config,
            lambda tokenizer: text_metadata.read_folder_text_metadata(self.folder, tokenizer),
            lambda: self._open_tensors(config),
            lambda target: write_tokenizer(self.folder, target),
        )

    def _open_tensors(self, config: ModelConfig) -> "Mapping[str, np.ndarray]":
        from onward.models.loader.safetensors_file import CanonicalTensors, MappedTensors
        from onward.models.loader.weight_conversion import Float32Tensors

        files = self.weight_files
        checkpoint.check_checkpoint(files, config, source=str(self.folder))
        return Float32Tensors(CanonicalTensors(MappedTensors(files), config), expected_tensors(config))
