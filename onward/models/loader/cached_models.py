"""Lists and removes cached models: those of the Hugging Face hub, converted ones, and downloads.

The hub's cache is shared with other programs. Its models are listed, but removed only one by one.
"""

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from onward.errors import StartupError
from onward.models.loader import sealed_folder
from onward.models.loader.model_lock import claim, mapped_files
from onward.models.loader.model_store import read_manifest

_HUB_PREFIX = "models--"
Kind = Literal["hub", "converted", "download", "leftover"]


@dataclass(frozen=True, slots=True)
class ModelCacheEntry:
    name: str
    """A Hugging Face id, or the name of a folder or file of our cache."""
    kind: Kind
    """`leftover`: an unfinished folder; it counts as in use while a conversion may still write it."""
    path: Path
    size: int
    """Bytes on disk."""
    is_in_use: bool
    description: str

    @property
    def is_pruned_by_default(self) -> bool:
        """Whether a later start can make it again from files that are kept, and no process uses it."""
        return self.kind in ("converted", "leftover") and not self.is_in_use


def list_models(cache_dir: Path, hub_dir: Path) -> list[ModelCacheEntry]:
    mapped = mapped_files()
    hub_folders = [path for path in _entries(hub_dir) if path.name.startswith(_HUB_PREFIX) and path.is_dir()]
    found = [
        *(_hub_model(path, mapped) for path in hub_folders),
        *(_converted(path, mapped) for path in _entries(cache_dir / "models") if path.is_dir()),
        *(_download(path) for path in _entries(cache_dir / "downloads") if path.is_file()),
    ]
    return sorted(found, key=lambda model: (model.kind, model.name))


def find_model(models: list[ModelCacheEntry], name: str) -> ModelCacheEntry:
    """Finds a model by its name, or by an unambiguous prefix of it."""
    exact = [model for model in models if model.name == name]
    found = exact or [model for model in models if model.name.startswith(name)]
    if len(found) != 1:
        known = ", ".join(model.name for model in found or models) or "nothing is cached"
        problem = "stands for several models" if found else "is not cached"
        raise StartupError(f"{name!r} {problem}: {known}")
    return found[0]


def remove_model(model: ModelCacheEntry) -> None:
    """Removes a model. Checks once more whether a process uses it, and raises `StartupError` if so."""
    try:
        if not model.path.is_dir():
            model.path.unlink()
            return
        with claim(_locked_folders(model.path), mapped_files()) as is_free:
            if not is_free:
                raise StartupError(f"{model.name} is in use; stop the server that serves it first")
            shutil.rmtree(model.path)
    except OSError as fault:
        raise StartupError(f"{model.name} cannot be removed: {fault}") from None


def list_files(model: ModelCacheEntry) -> list[tuple[str, int]]:
    """Returns the files of a model, as relative names, with their sizes. Revisions of a hub model may share files."""
    if not model.path.is_dir():
        return [(model.path.name, model.size)]
    root = model.path / "snapshots" if model.kind == "hub" else model.path
    return sorted((str(path.relative_to(root)), path.stat().st_size) for path in root.rglob("*") if path.is_file())


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _hub_model(path: Path, mapped: Collection[bytes]) -> ModelCacheEntry:
    refs = {ref.read_text().strip(): str(ref.relative_to(path / "refs")) for ref in _files(path / "refs")}
    commits = [folder.name for folder in _entries(path / "snapshots")]
    revisions = [f"{refs[commit]} ({commit[:8]})" if commit in refs else commit[:8] for commit in commits]
    name = path.name.removeprefix(_HUB_PREFIX).replace("--", "/", 1)
    description = ", ".join(revisions) or "nothing complete"
    return ModelCacheEntry(name, "hub", path, _size(path), _is_in_use(path, mapped), description)


def _converted(path: Path, mapped: Collection[bytes]) -> ModelCacheEntry:
    if path.name.startswith("."):
        is_in_use = not sealed_folder.is_abandoned(path)
        return ModelCacheEntry(path.name, "leftover", path, _size(path), is_in_use, "a conversion that did not end")
    manifest = read_manifest(path)
    if manifest is None:
        description = "damaged, or of another version"
    else:
        description = f"{manifest.name}: {manifest.config.architecture}, {manifest.precision}"
    return ModelCacheEntry(path.name, "converted", path, _size(path), _is_in_use(path, mapped), description)


def _download(path: Path) -> ModelCacheEntry:
    return ModelCacheEntry(path.name, "download", path, path.stat().st_size, False, "fetched for the default model")


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _size(folder: Path) -> int:
    """Returns the bytes of all files. Links do not count, because their targets are in the same folder."""
    return sum(path.lstat().st_size for path in _files(folder) if not path.is_symlink())


def _locked_folders(path: Path) -> list[Path]:
    """Returns the folders that a server of the model would lock."""
    return [folder for folder in _entries(path / "snapshots") if folder.is_dir()] or [path]


def _is_in_use(path: Path, mapped: Collection[bytes]) -> bool:
    with claim(_locked_folders(path), mapped) as is_free:
        return not is_free


def to_builtins(model: ModelCacheEntry) -> dict[str, object]:
    return msgspec.to_builtins(model, enc_hook=str)
