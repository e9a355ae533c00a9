"""Makes a model ready to be served: found or fetched, converted once where that is needed, described in one struct.

Two ways lead out. A float checkpoint in safetensors is used where it lies. A GGUF file, or anything to be quantized, is
converted into a folder of the cache whose name carries the hash of all that went in; later starts only check its seal,
without torch, numpy or gguf.

`dtype` `auto` is float32: on a CPU the narrower types are slower as well as less exact, whatever the checkpoint is
stored in. `quantization` `auto` is int8 for checkpoints that are quantized already, which lose nothing more to speak of,
and none for others, whose owner has not agreed to a loss. On CUDA `auto` is bfloat16 and none; fp8 weights are made from
the checkpoint's own when they are loaded.
"""

import hashlib
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from onward import config as settings
from onward.errors import StartupError
from onward.models.device_support import check_supported, device_kind
from onward.models.fingerprint import numerics_fingerprint
from onward.models.loader import default_model, hf_hub, sealed_folder, text_metadata, tokenizer_files
from onward.models.loader import generation_config as generation_defaults
from onward.models.loader.cache_errors import cache_error_message, is_cache_error
from onward.models.loader.config_parser import from_hf
from onward.models.loader.file_property_cache import ProgressCallback, sha256_of
from onward.models.loader.hf_hub import EarlyChecks
from onward.models.loader.model_sources import FolderSource, GgufSource, ModelSource, OpenedModel
from onward.optional_packages import require_cuda, require_torch
from onward.proto.model import ModelConfig, PreparedModel, SamplingDefaults

MANIFEST = "manifest.json"

_FORMAT = 2
"""Of converted folders. Raised when their content changes for the same input."""
_NUM_HASH_THREADS = 8
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, slots=True)
class _WeightFormat:
    """What the weights shall become, with nothing left to choose."""

    dtype: str
    quantization: str
    is_dummy: bool
    device: str = "cpu"
    is_deterministic: bool = False

    @property
    def stored_quantization(self) -> str:
        """Of the prepared files: what is quantized while it is loaded is stored as it was."""
        return "none" if self.quantization == "fp8" else self.quantization

    @property
    def scheme(self) -> str:
        if self.quantization in ("none", "fp8"):
            return self.quantization
        from onward.kernels.quantize import SCHEME

        return SCHEME


def prepare(
    model: str,
    *,
    served_model_name: str | None = None,
    dtype: str = "auto",
    quantization: str = "auto",
    load_format: str = "auto",
    generation_config: str = "auto",
    revision: str | None = None,
    chat_template: str | None = None,
    max_model_len: int | None = None,
    device: str = "cpu",
    deterministic: bool = False,
    cache_dir: Path | None = None,
    progress: ProgressCallback = lambda message, fraction: None,
) -> PreparedModel:
    """`generation_config` `none`: the checkpoint's own sampling defaults do not count. `chat_template`: a file to take
    instead of the checkpoint's own template. `progress(message, fraction)` hears of downloads and conversions; the fraction
    may be unknown.

    What cannot be served is refused before anything large is fetched, hashed or converted."""
    _check_device(device, quantization, deterministic=deterministic)
    if deterministic and dtype not in ("auto", "bfloat16"):
        raise StartupError(f"--deterministic does not go with --dtype {dtype}; take bfloat16")
    check_packages(model, device=device, quantization=quantization)
    template = None if chat_template is None else read_chat_template(chat_template)
    cache_dir = cache_dir or settings.cache_dir()
    try:
        # Checkpoints of the hub are not quantized, so `auto` has nothing to choose there.
        hub_kind = device_kind(device, "none" if quantization == "auto" else quantization)
        checks = EarlyChecks(
            lambda raw: _check_config(from_hf(raw), hub_kind, max_model_len),
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
        model_config = source.cached_config(cache_dir)
        if quantization == "auto":
            quantization = "int8" if device == "cpu" and source.is_quantized(cache_dir) else "none"
            if device == "cpu" and quantization == "none":
                _require_torch_for_floats(model)
        _check_config(model_config, device_kind(device, quantization), max_model_len)
        if load_format != "dummy" or isinstance(source, GgufSource):
            source.check_headers(cache_dir)
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "bfloat16"
        weight_format = _WeightFormat(dtype, quantization, load_format == "dummy", device, deterministic)
        if isinstance(source, FolderSource) and weight_format.stored_quantization == "none":
            prepared = _prepare_unconverted(source, weight_format, cache_dir, progress)
        else:
            prepared = _prepare_converted(source, weight_format, cache_dir, progress)
        # Read at each start, as it costs nothing: a converted folder says nothing about them.
        defaults = SamplingDefaults() if generation_config == "none" else source.sampling_defaults()
    except OSError as fault:
        reason = cache_error_message(fault, cache_dir) if is_cache_error(fault, cache_dir) else fault
        raise StartupError(f"cannot prepare the model {model}: {reason}") from None
    return msgspec.structs.replace(
        prepared,
        name=served_model_name or source.name,
        sampling_defaults=defaults,
        is_deterministic=deterministic,
        chat_template=prepared.chat_template if template is None else template,
    )


def read_chat_template(path: str) -> str:
    """The contents of `--chat-template`'s file, which is a template that can be used."""
    from onward.text.chat_template import ChatTemplate

    try:
        template = text_metadata.read_template(Path(path).expanduser())
        ChatTemplate(template)
    except StartupError as fault:
        raise StartupError(f"--chat-template {path}: {fault.message}") from None
    return template


def _check_config(config: ModelConfig, kind: str, max_model_len: int | None) -> None:
    """Raises unless a device of this kind can serve such a model."""
    check_supported(config, kind)
    limit = config.max_position_embeddings
    if max_model_len is not None and not 0 < max_model_len <= limit:
        raise StartupError(f"--max-model-len {max_model_len} is not within the model's 1 to {limit} tokens")


def _check_description(folder: Path, cache_dir: Path) -> None:
    """Raises unless tokenizer, templates and defaults can be used."""
    tokenizer = tokenizer_files.prepare_tokenizer(folder, cache_dir)
    text_metadata.read_folder_text_metadata(folder, tokenizer)
    generation_defaults.read_sampling_defaults(folder)


def _check_device(device: str, quantization: str, *, deterministic: bool) -> None:
    if quantization == "int8" and device != "cpu":
        raise StartupError("--quantization int8 is for --device cpu; on CUDA there are fp8 and none")
    if device == "cpu" and (quantization == "fp8" or deterministic):
        flag = "--quantization fp8" if quantization == "fp8" else "--deterministic"
        raise StartupError(f"{flag} needs --device cuda; on CPU --quantization int8 gives the same bits always")
    if quantization == "fp8" and deterministic:
        raise StartupError("--deterministic does not go with --quantization fp8, whose products depend on the batch")


def check_packages(model: str, *, device: str, quantization: str) -> None:
    """Raises if the model's precision needs a package that is not installed. Fetches and opens nothing, so a .gguf file
    passes here, and is refused when its header shows that its weights are floats."""
    if device == "cuda":
        require_cuda("--device cuda")
    elif quantization == "none":
        require_torch("--quantization none", alternative="--quantization int8")
    elif quantization == "auto" and (_is_folder(model) or _is_hub_id(model)):
        _require_torch_for_floats(model)


def _require_torch_for_floats(model: str) -> None:
    require_torch(f"the model {model} (float weights, on CPU)", alternative="--quantization int8")


def resolve_source(
    model: str,
    *,
    revision: str | None = None,
    with_weights: bool,
    cache_dir: Path,
    progress: ProgressCallback,
    checks: EarlyChecks | None = None,
) -> ModelSource:
    """The default model's name, a folder, a .gguf file, or a Hugging Face id, in this order."""
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
    raise StartupError(
        f"no such model: {model!r} is no folder, no .gguf file, no Hugging Face id (owner/name), "
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
        fingerprint=_fingerprint(source, weight_format, cache_dir, progress),
        weights=[path.name for path in files],
        tokenizer=tokenizer,
        created_s=max(0, int((source.folder / "config.json").stat().st_mtime)),
        **msgspec.structs.asdict(metadata),
    )


def _prepare_converted(
    source: ModelSource, weight_format: _WeightFormat, cache_dir: Path, progress: ProgressCallback
) -> PreparedModel:
    fingerprint = _fingerprint(source, weight_format, cache_dir, progress)
    others = [sha256_of(path, cache_dir, progress) for path in source.other_files]
    key = _hash_of([str(_FORMAT), fingerprint, *others])
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
    weights: list[str] = []
    if not weight_format.is_dummy or weight_format.stored_quantization != "none":
        weights = weight_conversion.write_weights(
            folder,
            opened.config,
            dummy_weights.DummyWeights(opened.config) if weight_format.is_dummy else opened.open_tensors(),
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
        **msgspec.structs.asdict(opened.read_text_metadata(None if tokenizer is None else str(folder / tokenizer))),
    )
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def _fingerprint(source: ModelSource, weight_format: _WeightFormat, cache_dir: Path, progress: ProgressCallback) -> str:
    return numerics_fingerprint(
        weights_sha256=_weights_hash(source, weight_format, cache_dir, progress),
        scheme=weight_format.scheme,
        dtype=weight_format.dtype,
        device=weight_format.device,
        deterministic=weight_format.is_deterministic,
    )


def _weights_hash(
    source: ModelSource, weight_format: _WeightFormat, cache_dir: Path, progress: ProgressCallback
) -> str:
    """Of the weights, or of what stands for them, and of the config that gives them their meaning."""
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
