"""Sources of models: a GGUF file, or a folder in Hugging Face's layout. Both have the same interface.

Opening a source is expensive and happens only when a model is converted. Properties that identify a source are cheap.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from onward.errors import StartupError
from onward.models.checkpoint_quantization import CheckpointScheme
from onward.models.families.registry import find_scheme, has_quantized_weights
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

    from onward.kernels.quantize import BlockMatrix


@dataclass(frozen=True, slots=True)
class OpenedWeights:
    """Weights by canonical name; values are made at each access."""

    tensors: "Mapping[str, np.ndarray]"
    """All tensors, as float32."""
    blocks: "Mapping[str, BlockMatrix]"
    """The stored bits of matrices that the int8 kernels can compute with directly."""
    source: str
    """The file or folder, for error messages."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    config: ModelConfig
    read_text_metadata: Callable[[str | None], text_metadata.TextMetadata]
    """Takes the path of the tokenizer that was written."""
    open_weights: Callable[[], OpenedWeights]
    write_tokenizer: Callable[[Path], str | None]
    """Puts `tokenizer.json` into a folder and returns its name, if the model has one."""


class ModelSource(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def weight_files(self) -> list[Path]: ...

    @property
    def other_files(self) -> list[Path]:
        """Other files that determine the prepared model."""
        ...

    def cached_config(self, cache_dir: Path) -> ModelConfig:
        """Returns the config, for checks before anything large is read. Raises if the model cannot be served."""
        ...

    def check_headers(self, cache_dir: Path) -> None:
        """Raises if the weight files do not match their headers. Called first, so that a damaged file is neither hashed
        nor mapped in vain."""
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
        """Returns no defaults, because GGUF files have none."""
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
            lambda: OpenedWeights(file, file.blocks, str(self.path)),
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


def _folder_advice(folder: Path) -> str:
    """Returns what to do about a folder without a config."""
    if (folder / "adapter_config.json").is_file():
        return "it holds an adapter (LoRA), and adapters are not served: merge it into its base model and serve that"
    if files := sorted(folder.glob("*.gguf")):
        return f"it has a GGUF file: give the file itself, {files[0]}"
    if configs := sorted(folder.glob("*/config.json")):
        return f"one of its folders has: give {configs[0].parent}"
    return "give the folder that has config.json and *.safetensors"


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
        checkpoint.check_checkpoint(self.weight_files, config, str(self.folder), self.read_scheme())

    def is_quantized(self, cache_dir: Path) -> bool:
        return has_quantized_weights(read_json(self.folder / "config.json"))

    def read_scheme(self) -> CheckpointScheme | None:
        """Returns how the weights are quantized; None if they are floats, or if the family's layouts read them."""
        return find_scheme(read_json(self.folder / "config.json"))

    def sampling_defaults(self) -> SamplingDefaults:
        return generation_config.read_sampling_defaults(self.folder)

    def read_config(self) -> ModelConfig:
        path = self.folder / "config.json"
        if not path.is_file():
            raise StartupError(
                f"{self.folder} is not a model folder: it has no config.json; {_folder_advice(self.folder)}"
            )
        return from_hf(read_json(path))

    def open(self) -> OpenedModel:
        config = self.read_config()
        return OpenedModel(
            config,
            lambda tokenizer: text_metadata.read_folder_text_metadata(self.folder, tokenizer),
            lambda: self._open_weights(config),
            lambda target: write_tokenizer(self.folder, target),
        )

    def _open_weights(self, config: ModelConfig) -> OpenedWeights:
        from onward.models.loader.safetensors_file import CanonicalTensors, MappedTensors
        from onward.models.loader.weight_conversion import Float32Tensors

        files, scheme = self.weight_files, self.read_scheme()
        checkpoint.check_checkpoint(files, config, str(self.folder), scheme)
        stored = MappedTensors(files)
        if scheme is None:
            canonical = CanonicalTensors(stored, config)
            blocks = canonical.blocks
        else:
            from onward.models.loader.quantized_tensors import QuantizedTensors, blocks_of

            quantized = QuantizedTensors(stored, scheme)
            canonical, blocks = CanonicalTensors(quantized, config), blocks_of(quantized, config)
        return OpenedWeights(Float32Tensors(canonical, expected_tensors(config)), blocks, str(self.folder))
