"""Where a model comes from: a GGUF file or a folder in Hugging Face's layout. Both open to the same things.

Opening is the expensive part and happens only when a model is converted; what identifies a source is cheap to ask.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from onward.errors import StartupError
from onward.models.loader import checkpoint, generation_config, text_metadata
from onward.models.loader.bounded_read import read_json
from onward.models.loader.config_parser import from_hf
from onward.models.loader.file_property_cache import cached_property_of
from onward.models.tensor_names import expected_tensors
from onward.proto.model import ModelConfig, SamplingDefaults

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class OpenedModel:
    config: ModelConfig
    text_metadata: text_metadata.TextMetadata
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

            build_tokenizer(file.metadata).save(str(folder / text_metadata.TOKENIZER), pretty=False)
            return text_metadata.TOKENIZER

        return OpenedModel(
            file.config, text_metadata.read_gguf_text_metadata(file.metadata), lambda: file, write_tokenizer
        )


def _check_gguf_header(path: Path) -> str:
    from onward.models.loader.gguf_header import read_header

    return f"{len(read_header(path).tensors)} tensors"


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
        return [path for name in text_metadata.TEXT_FILES if (path := self.folder / name).is_file()]

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
            text_metadata.read_folder_text_metadata(self.folder),
            lambda: self._open_tensors(config),
            self._copy_tokenizer,
        )

    def _open_tensors(self, config: ModelConfig) -> "Mapping[str, np.ndarray]":
        from onward.models.loader.safetensors_file import MappedTensors
        from onward.models.loader.weight_conversion import Float32Tensors

        files = self.weight_files
        checkpoint.check_checkpoint(files, config, source=str(self.folder))
        return Float32Tensors(MappedTensors(files), expected_tensors(config))

    def _copy_tokenizer(self, folder: Path) -> str | None:
        if not text_metadata.has_tokenizer(self.folder):
            return None
        shutil.copyfile(self.folder / text_metadata.TOKENIZER, folder / text_metadata.TOKENIZER)
        return text_metadata.TOKENIZER
