"""Fetches a checkpoint from the Hugging Face hub into the hub's own cache, and finds it there without a network.

Files that decide whether a model can be served come first: the list of files, `config.json`, then tokenizer and
templates. Each is checked before the next is fetched, and weights come last. A fetched model stays as it is until it is
removed from the cache, because a restart must not change what is served. A failed fetch keeps the files that were
complete, and the next one fetches the others. Pickled weights and code are never downloaded.
"""

import io
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from onward.config import hub_cache_dir, hub_endpoint, hub_is_offline
from onward.errors import StartupError
from onward.log import event
from onward.models.loader import checkpoint
from onward.models.loader.bounded_read import read_json
from onward.models.loader.cache_errors import cache_error_message, is_cache_error
from onward.models.loader.file_property_cache import ProgressCallback, write_atomically
from onward.models.loader.tokenizer_files import MERGES, find_tokenizer

logger = logging.getLogger(__name__)

DEFAULT_REVISION = "main"
CONFIG = "config.json"

_DESCRIPTION = ["*.json", "*.jinja", "*.model", "*.tiktoken", MERGES]
_WEIGHTS = ["*.safetensors"]
_IN_SUBFOLDERS = ["*/*"]
"""Not fetched, because repositories have copies for other programs there."""
_MAX_DOWNLOADS_AT_ONCE = 4
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")


@dataclass(frozen=True, slots=True)
class EarlyChecks:
    """Called while a model is fetched; each raises `StartupError` for a model that cannot be served."""

    check_config: Callable[[dict[str, Any]], object] = lambda raw: None
    """Called with the contents of `config.json`, before anything else is fetched."""
    check_description: Callable[[Path], object] = lambda folder: None
    """Called with the folder, when it has all files but the weights."""


class HubUnreachable(StartupError):
    """The hub did not answer, so it is not known whether it has the model."""


class _Receipt(msgspec.Struct, frozen=True):
    """The files of a complete fetch with their sizes, written when it has ended."""

    sizes: dict[str, int]


def check_revision(revision: str) -> None:
    if _REVISION.fullmatch(revision) is None or ".." in revision:
        raise StartupError(f"--revision {revision[:80]!r} is not a branch, a tag or a commit")


def repository_folder(hub_dir: Path, model_id: str) -> Path:
    return hub_dir / f"models--{model_id.replace('/', '--')}"


def fetch(
    model_id: str,
    revision: str,
    cache_dir: Path,
    progress: ProgressCallback,
    checks: EarlyChecks,
    *,
    with_weights: bool,
) -> Path:
    """Returns the folder of the checkpoint, and fetches it if needed. Without weights (`--load-format dummy`) only the
    files that describe the model are fetched. `cache_dir`: where the receipt of a complete fetch is written, if
    possible."""
    check_revision(revision)
    hub_dir = hub_cache_dir()
    cached = find_snapshot(hub_dir, model_id, revision)
    if cached is not None and _is_complete(
        cached, _receipt_path(cache_dir, model_id, cached, with_weights), with_weights
    ):
        return cached
    if hub_is_offline():
        if cached is not None and _has_what_is_needed(cached, with_weights):
            return cached
        raise StartupError(f"{model_id} is not complete in {hub_dir}, and HF_HUB_OFFLINE forbids to fetch it")
    progress(f"downloading {model_id}", None)
    try:
        folder = _Download(model_id, revision, hub_dir, progress).run(checks, with_weights=with_weights)
    except OSError as fault:
        if not is_cache_error(fault, hub_dir):
            raise
        message = cache_error_message(fault, hub_dir, variable="HF_HUB_CACHE")
        raise StartupError(f"cannot fetch {model_id}: {message}") from None
    except HubUnreachable as fault:
        if cached is None or not _has_what_is_needed(cached, with_weights):
            raise
        logger.warning(event("hub not reachable, serving from the cache", model=model_id, why=fault.message))
        return cached
    _write_receipt(_receipt_path(cache_dir, model_id, folder, with_weights), folder)
    return folder


def find_complete(model_id: str, revision: str, *, with_weights: bool) -> Path | None:
    """Returns the folder of a revision if the cache has all of its files that a start needs."""
    folder = find_snapshot(hub_cache_dir(), model_id, revision)
    return folder if folder is not None and _has_what_is_needed(folder, with_weights) else None


def find_snapshot(hub_dir: Path, model_id: str, revision: str) -> Path | None:
    """Returns the folder of a revision in the cache, complete or not."""
    repository = repository_folder(hub_dir, model_id)
    try:
        commit = revision if _COMMIT.fullmatch(revision) else (repository / "refs" / revision).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    folder = repository / "snapshots" / commit
    return folder if _COMMIT.fullmatch(commit) and folder.is_dir() else None


def _is_complete(folder: Path, receipt_path: Path, with_weights: bool) -> bool:
    """Returns whether nothing needs to be fetched. Our receipt lists the files; damaged ones are removed. Without a
    receipt (the cache was copied, or another program has fetched the model), a model with config, tokenizer and all
    weights is complete."""
    try:
        receipt = msgspec.json.decode(receipt_path.read_bytes(), type=_Receipt)
    except (OSError, msgspec.DecodeError):
        return _has_what_is_needed(folder, with_weights) and find_tokenizer(folder) is not None
    damaged = [folder / name for name, size in receipt.sizes.items() if _size(folder / name) != size]
    for path in damaged:
        # The library takes every existing file for complete, so the file and the target of its link are removed.
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    return not damaged


def _has_what_is_needed(folder: Path, with_weights: bool) -> bool:
    try:
        return (folder / CONFIG).is_file() and (not with_weights or bool(checkpoint.weight_files(folder)))
    except StartupError:
        return False


def _receipt_path(cache_dir: Path, model_id: str, folder: Path, with_weights: bool) -> Path:
    kind = "weights" if with_weights else "description"
    return cache_dir / "hub" / f"{model_id.replace('/', '--')}.{folder.name}.{kind}.json"


def _write_receipt(path: Path, folder: Path) -> None:
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    try:
        write_atomically(path, msgspec.json.encode(_Receipt(sizes)))
    except OSError as fault:  # the next start looks at the files instead
        logger.info(event("receipt not kept", path=path, why=fault))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


class _Download:
    """One fetch, step by step. Every failure in the library becomes a `StartupError`, except for a cache that cannot be
    written."""

    def __init__(self, model_id: str, revision: str, hub_dir: Path, progress: ProgressCallback) -> None:
        self._model_id, self._revision, self._hub_dir = model_id, revision, hub_dir
        self._progress = progress

    def run(self, checks: EarlyChecks, *, with_weights: bool) -> Path:
        commit, names = self._call(self._list_files)
        _check_names(names, self._model_id, with_weights)
        # By the revision, not by the commit, so that the library stores in the cache which commit the revision is.
        config_path = Path(self._call(self._fetch_config))
        checks.check_config(read_json(config_path))
        folder = Path(self._call(lambda: self._fetch_files(_DESCRIPTION, commit)))
        checks.check_description(folder)
        if with_weights:
            self._call(lambda: self._fetch_files(_WEIGHTS, commit))
        return folder

    def _list_files(self) -> tuple[str, list[str]]:
        from huggingface_hub import HfApi

        for name in ("httpx", "httpx2"):  # whichever the library uses: it logs every request
            logging.getLogger(name).setLevel(logging.WARNING)
        info = HfApi(endpoint=hub_endpoint()).model_info(self._model_id, revision=self._revision)
        assert info.sha is not None and info.siblings is not None, "the hub tells commit and files of a model"
        return info.sha, [sibling.rfilename for sibling in info.siblings]

    def _fetch_config(self) -> str:
        from huggingface_hub import hf_hub_download

        return hf_hub_download(
            self._model_id, CONFIG, revision=self._revision, cache_dir=self._hub_dir, endpoint=hub_endpoint()
        )

    def _fetch_files(self, patterns: list[str], commit: str) -> str:
        from huggingface_hub import snapshot_download

        return snapshot_download(
            self._model_id,
            revision=commit,
            cache_dir=self._hub_dir,
            endpoint=hub_endpoint(),
            allow_patterns=patterns,
            ignore_patterns=_IN_SUBFOLDERS,
            max_workers=_MAX_DOWNLOADS_AT_ONCE,
            tqdm_class=_reporting_bar(f"downloading {self._model_id}", self._progress),
        )

    def _call(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as fault:
            if isinstance(fault, OSError) and is_cache_error(fault, self._hub_dir):
                raise
            # The library and its HTTP client raise exceptions of many kinds, and all others mean that the fetch failed.
            reason = (str(fault).strip().splitlines() or [type(fault).__name__])[0]
            kind = StartupError if getattr(fault, "response", None) is not None else HubUnreachable
            raise kind(
                f"cannot fetch {self._model_id} (revision {self._revision}) from the Hugging Face hub: {reason}; try again "
                "to go on where it stopped, or give a folder or .gguf file with --model"
            ) from fault


def _check_names(names: Sequence[str], model_id: str, with_weights: bool) -> None:
    """Raises if the repository has no model that can be served. Called before anything is fetched."""
    files = [name for name in names if "/" not in name]
    if CONFIG not in files:
        if gguf := [name for name in files if name.endswith(".gguf")]:
            raise StartupError(
                f"{model_id} has GGUF files only ({gguf[0]}, …); download one of them and give its path with --model"
            )
        raise StartupError(f"{model_id} has no {CONFIG}, so it is not a model that can be served")
    if with_weights and not any(name.endswith(".safetensors") for name in files):
        raise StartupError(
            f"{model_id} has no weights in safetensors files; pickled weights are never loaded, convert them to safetensors"
        )


def _reporting_bar(message: str, progress: ProgressCallback) -> type[Any]:
    """Returns a class of progress bars for the library that draw nothing and call `progress`."""
    from tqdm import tqdm

    class ReportingBar(tqdm):  # pyright: ignore[reportMissingTypeArgument]
        monitor_interval = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"file": io.StringIO(), "disable": False}))

        def display(self, *args: Any, **kwargs: Any) -> None:
            if self.unit == "B" and self.total:
                progress(message, min(1.0, self.n / self.total))

    return ReportingBar
