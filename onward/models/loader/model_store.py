"""Prepares a model to be served: finds or fetches it, converts it once if needed, and describes it in one struct.

A float checkpoint in safetensors is used in place. A GGUF file, or any model that is to be quantized, is converted into
a folder of the cache whose name contains the hash of all inputs. Later starts only check the folder's seal, without
torch, numpy or gguf.

On a CPU, `dtype` `auto` is float32: narrower types are slower as well as less exact, whatever the checkpoint is stored
in. `quantization` `auto` is int8 for checkpoints that are quantized already, which lose almost nothing more, and none
for others, because the user has not agreed to a loss. On CUDA, `auto` is bfloat16 and none; fp8 weights are made from
the checkpoint's own when they are loaded.
"""

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from onward import config as settings
from onward.errors import StartupError
from onward.kernels.weight_formats import SCHEME
from onward.models.checkpoint_quantization import CheckpointScheme
from onward.models.device_support import check_supported, device_kind
from onward.models.families.registry import find_scheme, has_quantized_weights
from onward.models.fingerprint import numerics_fingerprint, with_ranks
from onward.models.loader import default_model, hf_hub, sealed_folder, text_metadata, tokenizer_files
from onward.models.loader import generation_config as generation_defaults
from onward.models.loader.cache_errors import cache_error_message, is_cache_error
from onward.models.loader.config_parser import from_hf
from onward.models.loader.file_property_cache import ProgressCallback, sha256_of
from onward.models.loader.hf_hub import EarlyChecks
from onward.models.loader.model_sources import FolderSource, GgufSource, ModelSource, OpenedModel, OpenedWeights
from onward.models.rank_limits import check_num_ranks
from onward.optional_packages import require_cuda, require_torch
from onward.proto.model import ModelConfig, PreparedModel, SamplingDefaults

MANIFEST = "manifest.json"

_NUM_HASH_THREADS = 8
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, slots=True)
class _WeightFormat:
    """The format in which a model's weights are used; the prepared files may have another one
    (`stored_quantization`). `dtype` and `quantization` may be `auto` until `_check_source`."""

    dtype: str
    quantization: str
    is_dummy: bool
    device: str = "cpu"
    is_deterministic: bool = False

    @property
    def stored_quantization(self) -> str:
        """Quantization of the prepared files. Weights that are quantized while they are loaded are stored
        unquantized."""
        return "none" if self.quantization == "fp8" else self.quantization

    @property
    def scheme(self) -> str:
        return self.quantization if self.quantization in ("none", "fp8") else SCHEME


def prepare(
    model: str,
    *,
    served_model_names: Sequence[str] = (),
    aliases: Sequence[str] = (),
    dtype: str = "auto",
    quantization: str = "auto",
    load_format: str = "auto",
    generation_config: str = "auto",
    revision: str | None = None,
    chat_template: str | None = None,
    max_model_len: int | None = None,
    tensor_parallel: int = 1,
    device: str = "cpu",
    deterministic: bool = False,
    cache_dir: Path | None = None,
    progress: ProgressCallback = lambda message, fraction: None,
) -> PreparedModel:
    """Prepares a model. Refuses a model that cannot be served before anything large is fetched, hashed or converted.

    `generation_config` `none`: the checkpoint's own sampling defaults are ignored. `chat_template`: a file that
    replaces the checkpoint's own template. `progress(message, fraction)` is called during downloads and conversions;
    the fraction is None if it is unknown.
    """
    _check_device(device, quantization, dtype, deterministic=deterministic)
    check_packages(device=device, quantization=quantization)
    template = None if chat_template is None else read_chat_template(chat_template)
    cache_dir = cache_dir or settings.cache_dir()
    try:
        checks = EarlyChecks(
            lambda raw: check_raw_config(model, raw, device, quantization, max_model_len, tensor_parallel),
            lambda folder: _check_description(folder, cache_dir),
        )
        source = resolve_source(
            model,
            revision=revision,
            with_weights=load_format != "dummy",
            cache_dir=cache_dir,
            progress=progress,
            checks=checks,
        )
        weight_format = _check_source(
            model,
            source,
            _WeightFormat(dtype, quantization, load_format == "dummy", device, deterministic),
            max_model_len,
            tensor_parallel,
            cache_dir,
        )
        keeps_floats = weight_format.stored_quantization == "none"
        if keeps_floats and isinstance(source, FolderSource) and source.read_scheme() is None:
            prepared = _prepare_unconverted(source, weight_format, cache_dir, progress)
        else:
            prepared = _prepare_converted(source, weight_format, cache_dir, progress)
        # Read at each start, because a converted folder does not contain them. This is cheap.
        defaults = SamplingDefaults() if generation_config == "none" else source.sampling_defaults()
    except OSError as fault:
        raise _unreadable(model, fault, cache_dir) from None
    name = served_model_names[0] if served_model_names else source.name
    fingerprint = prepared.fingerprint
    if tensor_parallel > 1 and prepared.quantization != "int8":
        fingerprint = with_ranks(fingerprint, tensor_parallel)
    return msgspec.structs.replace(
        prepared,
        name=name,
        aliases=tuple(dict.fromkeys(alias for alias in (*served_model_names, *aliases) if alias != name)),
        sampling_defaults=defaults,
        is_deterministic=deterministic,
        fingerprint=fingerprint,
        chat_template=prepared.chat_template if template is None else template,
    )


def _check_source(
    model: str, source: ModelSource, wanted: _WeightFormat, max_model_len: int | None, num_ranks: int, cache_dir: Path
) -> _WeightFormat:
    """Returns the wanted format without `auto`. Raises if config or headers show that the model cannot be served in
    it."""
    config, device = source.cached_config(cache_dir), wanted.device
    quantization, dtype = wanted.quantization, wanted.dtype
    if quantization == "auto":
        quantization = _automatic_quantization(model, device, is_quantized=source.is_quantized(cache_dir))
    _check_config(config, device_kind(device, quantization), max_model_len)
    check_num_ranks(num_ranks, model, config, quantization)
    if isinstance(source, FolderSource):
        _check_scheme(source.read_scheme(), device)
    if not wanted.is_dummy or isinstance(source, GgufSource):
        source.check_headers(cache_dir)
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    return replace(wanted, quantization=quantization, dtype=dtype)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model whose files are here and can be served."""

    name: str
    architecture: str
    precision: str
    has_tokenizer: bool


def check_local_model(config: settings.ServeConfig) -> LocalModel | None:
    """Makes all checks of a start that read config, headers and texts of a model. Returns None if its files are not
    here yet. Fetches, hashes and converts nothing, and leaves nothing in the cache."""
    cache_dir = settings.cache_dir()
    _check_device(config.device, config.quantization, config.dtype, deterministic=config.deterministic)
    if config.chat_template is not None:
        read_chat_template(config.chat_template)
    try:
        source = _find_local_source(config.model, config.revision, config.load_format, cache_dir)
        if source is None:
            return None
        wanted = _WeightFormat(
            config.dtype, config.quantization, config.load_format == "dummy", config.device, config.deterministic
        )
        with tempfile.TemporaryDirectory() as temporary:
            weight_format = _check_source(
                config.model, source, wanted, config.max_model_len, config.tensor_parallel, Path(temporary)
            )
            if isinstance(source, FolderSource):
                tokenizer = _check_description(source.folder, Path(temporary))
            else:
                tokenizer = source.open().write_tokenizer(Path(temporary))
            architecture = source.cached_config(Path(temporary)).architecture
    except OSError as fault:
        raise _unreadable(config.model, fault, cache_dir) from None
    precision = weight_format.dtype if weight_format.quantization == "none" else weight_format.quantization
    return LocalModel(source.name, architecture, precision, tokenizer is not None)


def _find_local_source(model: str, revision: str | None, load_format: str, cache_dir: Path) -> ModelSource | None:
    if model == settings.DEFAULT_MODEL:
        path = default_model.downloaded_path(cache_dir)
        return GgufSource(path, name=model) if _is_readable_file(path) else None
    if _is_hub_id(model):
        with_weights = load_format != "dummy"
        folder = hf_hub.find_complete(model, revision or hf_hub.DEFAULT_REVISION, with_weights=with_weights)
        return None if folder is None else FolderSource(folder, name=model)
    return resolve_source(
        model, revision=revision, with_weights=True, cache_dir=cache_dir, progress=lambda message, fraction: None
    )


def _is_readable_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _unreadable(model: str, fault: OSError, cache_dir: Path) -> StartupError:
    if is_cache_error(fault, cache_dir):
        return StartupError(f"cannot prepare the model {model}: {cache_error_message(fault, cache_dir)}")
    if isinstance(fault, PermissionError) and fault.filename is not None:
        return StartupError(
            f"cannot prepare the model {model}: {os.fsdecode(fault.filename)} may not be read by this user; "
            "change its permissions, or those of its folder"
        )
    return StartupError(f"cannot prepare the model {model}: {fault}")


def read_chat_template(path: str) -> str:
    """Returns the contents of the file of `--chat-template`. Raises `StartupError` if it is not a usable template."""
    from onward.text.chat_template import ChatTemplate

    try:
        template = text_metadata.read_template(Path(path).expanduser())
        ChatTemplate(template)
    except StartupError as fault:
        raise StartupError(f"--chat-template {path}: {fault.message}") from None
    return template


def check_raw_config(
    model: str, raw: Mapping[str, Any], device: str, quantization: str, max_model_len: int | None, num_ranks: int = 1
) -> None:
    """Raises if `config.json` alone shows that the model cannot be served here."""
    config, scheme = from_hf(raw), find_scheme(raw)
    _check_scheme(scheme, device)
    if quantization == "auto":
        quantization = _automatic_quantization(model, device, is_quantized=has_quantized_weights(raw))
    _check_config(config, device_kind(device, quantization), max_model_len)
    check_num_ranks(num_ranks, model, config, quantization)


def _automatic_quantization(model: str, device: str, *, is_quantized: bool) -> str:
    """Returns the quantization of `--quantization auto`. Raises if it needs a package that is not installed."""
    if device == "cpu" and is_quantized:
        return "int8"
    if device == "cpu":
        require_torch(f"the model {model} (float weights, on CPU)", alternative="--quantization int8")
    return "none"


def _check_scheme(scheme: CheckpointScheme | None, device: str) -> None:
    if scheme is not None and device == "cuda":
        raise StartupError(
            f"the model's quantization_config ({scheme.name}) is not supported with --device cuda; serve it with "
            "--device cpu, or serve the model's float checkpoint"
        )


def _check_config(config: ModelConfig, kind: str, max_model_len: int | None) -> None:
    """Raises unless a device of this kind can serve such a model."""
    check_supported(config, kind)
    limit = config.max_position_embeddings
    if max_model_len is not None and not 0 < max_model_len <= limit:
        raise StartupError(f"--max-model-len {max_model_len} is not within the model's 1 to {limit} tokens")


def _check_description(folder: Path, cache_dir: Path) -> str | None:
    """Returns the path of the tokenizer, if there is one. Raises unless tokenizer, templates and defaults can be
    used."""
    tokenizer = tokenizer_files.prepare_tokenizer(folder, cache_dir)
    text_metadata.read_folder_text_metadata(folder, tokenizer)
    generation_defaults.read_sampling_defaults(folder)
    return tokenizer


def _check_device(device: str, quantization: str, dtype: str, *, deterministic: bool) -> None:
    if quantization == "int8" and device != "cpu":
        raise StartupError("--quantization int8 is for --device cpu; on CUDA there are fp8 and none")
    if device == "cpu" and (quantization == "fp8" or deterministic):
        flag = "--quantization fp8" if quantization == "fp8" else "--deterministic"
        raise StartupError(f"{flag} needs --device cuda; on CPU --quantization int8 gives the same bits always")
    if quantization == "fp8" and deterministic:
        raise StartupError("--deterministic does not go with --quantization fp8, whose products depend on the batch")
    if deterministic and dtype not in ("auto", "bfloat16"):
        raise StartupError(f"--deterministic does not go with --dtype {dtype}; take bfloat16")


def check_packages(*, device: str, quantization: str) -> None:
    """Raises if a flag needs a package that is not installed. With `--quantization auto` the model decides: it is
    refused when its config or its header shows that its weights are floats."""
    if device == "cuda":
        require_cuda("--device cuda")
    elif quantization == "none":
        require_torch("--quantization none", alternative="--quantization int8")


def resolve_source(
    model: str,
    *,
    revision: str | None = None,
    with_weights: bool,
    cache_dir: Path,
    progress: ProgressCallback,
    checks: EarlyChecks | None = None,
) -> ModelSource:
    """Finds the source of a model: the default model by its name, a folder, a .gguf file, or a Hugging Face id, in this
    order."""
    if revision is not None and not _is_hub_id(model):
        raise StartupError(f"--revision {revision[:80]} is for a Hugging Face id (owner/name), and {model!r} is none")
    if model == settings.DEFAULT_MODEL:
        return GgufSource(default_model.fetch(cache_dir, progress), name=model)
    path = Path(model).expanduser()
    if _is_folder(model):
        return FolderSource(path.resolve(), name=path.resolve().name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise StartupError(f"{model} is a file, but not a .gguf; give the folder of a checkpoint instead")
        return GgufSource(path.resolve(), name=path.stem)
    if _is_hub_id(model):
        wanted = hf_hub.DEFAULT_REVISION if revision is None else revision
        folder = hf_hub.fetch(model, wanted, cache_dir, progress, checks or EarlyChecks(), with_weights=with_weights)
        return FolderSource(folder, name=model)
    if path.suffix == ".gguf" or path.is_absolute() or model.startswith((".", "~")):
        raise StartupError(f"no such model: {model} does not exist; give a folder, a .gguf file or a Hugging Face id")
    raise StartupError(
        f"no such model: {model!r} is not a folder, a .gguf file or a Hugging Face id (owner/name), "
        f"and not the default model {settings.DEFAULT_MODEL!r}"
    )


def _is_folder(model: str) -> bool:
    return bool(model) and Path(model).expanduser().is_dir()


def _is_hub_id(model: str) -> bool:
    path = Path(model).expanduser()
    return not path.exists() and path.suffix != ".gguf" and _HUB_ID.fullmatch(model) is not None


def _prepare_unconverted(
    source: FolderSource, weight_format: _WeightFormat, cache_dir: Path, progress: ProgressCallback
) -> PreparedModel:
    config = source.read_config()
    files: list[Path] = []
    if not weight_format.is_dummy:
        files = source.weight_files
    tokenizer = tokenizer_files.prepare_tokenizer(source.folder, cache_dir)
    metadata = text_metadata.read_folder_text_metadata(source.folder, tokenizer)
    return PreparedModel(
        name=source.name,
        folder=str(source.folder),
        config=config,
        dtype=weight_format.dtype,
        quantization=weight_format.quantization,
        fingerprint=_fingerprint(source, weight_format, cache_dir, progress, is_converted=False),
        weights=[path.name for path in files],
        tokenizer=tokenizer,
        created_s=max(0, int((source.folder / "config.json").stat().st_mtime)),
        **msgspec.structs.asdict(metadata),
    )


def _prepare_converted(
    source: ModelSource, weight_format: _WeightFormat, cache_dir: Path, progress: ProgressCallback
) -> PreparedModel:
    fingerprint = _fingerprint(source, weight_format, cache_dir, progress, is_converted=True)
    others = [sha256_of(path, cache_dir, progress) for path in source.other_files]
    key = _hash_of([fingerprint, *others])
    folder = cache_dir / "models" / f"{_file_name(source.name)}-{key[:16]}"
    if (prepared := read_manifest(folder)) is not None:
        return prepared

    def write(target: Path) -> None:
        _write_converted(target, source.open(), source.name, weight_format, fingerprint, progress)

    sealed_folder.build_folder(folder, write)
    prepared = read_manifest(folder)
    if prepared is None:
        raise StartupError(f"the converted model in {folder} cannot be read back; is the disk full or failing?")
    return prepared


def read_manifest(folder: Path) -> PreparedModel | None:
    if not sealed_folder.is_intact(folder):
        return None
    try:
        prepared = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=PreparedModel)
    except (OSError, msgspec.DecodeError):
        return None
    return msgspec.structs.replace(prepared, folder=str(folder))


def _write_converted(
    folder: Path,
    opened: OpenedModel,
    name: str,
    weight_format: _WeightFormat,
    fingerprint: str,
    progress: ProgressCallback,
) -> None:
    from onward.models.loader import dummy_weights, weight_conversion

    progress(f"converting {name}", 0.0)
    tokenizer = opened.write_tokenizer(folder)
    weights, formats = [], ()
    if not weight_format.is_dummy or weight_format.stored_quantization != "none":
        if weight_format.is_dummy:
            source = OpenedWeights(dummy_weights.DummyWeights(opened.config), {}, "dummy weights")
        else:
            source = opened.open_weights()
        weights, formats = weight_conversion.write_weights(
            folder,
            opened.config,
            source,
            quantization=weight_format.stored_quantization,
            dtype=weight_format.dtype,
            progress=progress,
        )
    manifest = PreparedModel(
        name=name,
        folder="",
        config=opened.config,
        dtype=weight_format.dtype,
        quantization=weight_format.quantization,
        fingerprint=fingerprint,
        weights=weights,
        tokenizer=tokenizer,
        created_s=int(time.time()),
        weight_formats=formats,
        is_converted=True,
        **msgspec.structs.asdict(opened.read_text_metadata(None if tokenizer is None else str(folder / tokenizer))),
    )
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def _fingerprint(
    source: ModelSource,
    weight_format: _WeightFormat,
    cache_dir: Path,
    progress: ProgressCallback,
    *,
    is_converted: bool,
) -> str:
    return numerics_fingerprint(
        weights_sha256=_weights_hash(source, weight_format, cache_dir, progress),
        scheme=weight_format.scheme,
        dtype=weight_format.dtype,
        device=weight_format.device,
        deterministic=weight_format.is_deterministic,
        is_converted=is_converted,
    )


def _weights_hash(
    source: ModelSource, weight_format: _WeightFormat, cache_dir: Path, progress: ProgressCallback
) -> str:
    """Returns a hash of the weights and of the config that gives them their meaning. Dummy weights are hashed by their
    version."""
    files = [path for path in source.other_files if path.name == "config.json"]
    hashes = []
    if weight_format.is_dummy:
        from onward.models.loader import dummy_weights

        hashes.append(dummy_weights.VERSION)
    if isinstance(source, GgufSource) or not weight_format.is_dummy:
        files += source.weight_files
    with ThreadPoolExecutor(_NUM_HASH_THREADS) as threads:
        return _hash_of(hashes + list(threads.map(lambda path: sha256_of(path, cache_dir, progress), files)))


def _hash_of(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "--", name)[:80]
