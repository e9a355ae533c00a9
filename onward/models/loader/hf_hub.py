"""Fetches a checkpoint from the Hugging Face hub into the cache, and finds it there the next time without a network.

A model once fetched stays as it is until it is removed from the cache: a restart must not change what is served. An
attempt that fails keeps the files that were complete, and the next one fetches the others. Pickled weights and code are
not even downloaded.
"""

import io
from pathlib import Path
from typing import Any

import msgspec

from onward.config import hub_endpoint
from onward.errors import StartupError
from onward.models.loader.cache_errors import is_cache_error
from onward.models.loader.file_property_cache import ProgressCallback, write_atomically

_DESCRIPTION = ["*.json", "*.jinja"]
_WEIGHTS = ["*.safetensors"]
_IN_SUBFOLDERS = ["*/*"]
"""Repositories keep copies for other programs there."""
_MAX_DOWNLOADS_AT_ONCE = 4


class _Receipt(msgspec.Struct, frozen=True):
    """Written when a fetch is complete."""

    folder: str
    sizes: dict[str, int]


def fetch(model_id: str, cache_dir: Path, progress: ProgressCallback, *, with_weights: bool) -> Path:
    """The folder of the checkpoint. Without weights (`--load-format dummy`) only what describes the model is fetched."""
    kind = "weights" if with_weights else "description"
    receipt_path = cache_dir / "hub" / f"{model_id.replace('/', '--')}.{kind}.json"
    if (folder := _find_fetched(receipt_path)) is not None:
        return folder
    progress(f"downloading {model_id}", None)
    patterns = _DESCRIPTION + (_WEIGHTS if with_weights else [])
    folder = Path(_download(model_id, cache_dir / "hub", patterns, progress))
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    write_atomically(receipt_path, msgspec.json.encode(_Receipt(str(folder), sizes)))
    return folder


def _find_fetched(receipt_path: Path) -> Path | None:
    try:
        receipt = msgspec.json.decode(receipt_path.read_bytes(), type=_Receipt)
    except (OSError, msgspec.DecodeError):
        return None
    folder = Path(receipt.folder)
    damaged = [folder / name for name, size in receipt.sizes.items() if _size(folder / name) != size]
    for path in damaged:
        # The library takes a file that is there for a file that is whole, so it must go, and what its link points to.
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    return None if damaged else folder


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _download(model_id: str, hub_dir: Path, patterns: list[str], progress: ProgressCallback) -> str:
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(
            model_id,
            cache_dir=hub_dir,
            endpoint=hub_endpoint(),
            allow_patterns=patterns,
            ignore_patterns=_IN_SUBFOLDERS,
            max_workers=_MAX_DOWNLOADS_AT_ONCE,
            tqdm_class=_reporting_bar(f"downloading {model_id}", progress),
        )
    except Exception as fault:
        if isinstance(fault, OSError) and is_cache_error(fault, hub_dir):
            raise
        # Whatever else the library and the HTTP client beneath it raise, of which there are many kinds, means this.
        reason = (str(fault).strip().splitlines() or [type(fault).__name__])[0]
        raise StartupError(
            f"cannot fetch {model_id} from the Hugging Face hub: {reason}; try again to go on where it stopped, "
            "or give a folder or .gguf file with --model"
        ) from fault


def _reporting_bar(message: str, progress: ProgressCallback) -> type[Any]:
    """A progress bar, as the library wants to be given one, that draws nothing and tells `progress`."""
    from tqdm import tqdm

    class ReportingBar(tqdm):  # pyright: ignore[reportMissingTypeArgument]
        monitor_interval = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"file": io.StringIO(), "disable": False}))

        def display(self, *args: Any, **kwargs: Any) -> None:
            if self.unit == "B" and self.total:
                progress(message, min(1.0, self.n / self.total))

    return ReportingBar
