"""`onward models`: what it lists, shows and removes, and what it never removes."""

import json
import mmap
import os
import pty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onward.cli.main import run
from onward.errors import StartupError
from onward.models.loader.model_lock import hold_model
from onward.models.loader.model_store import prepare
from onward.models.loader.sealed_folder import is_abandoned
from tests.models.checkpoints import random_tensors, tiny_config, write_folder, write_gguf
from tests.models.hub_server import Hub, serve

CONFIG = tiny_config(hidden_size=64, intermediate_size=128, head_dim=16)
MODEL_ID = "tiny-labs/Tiny"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With a converted model, one of the hub, a download and a leftover of long ago."""
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    prepare(str(write_gguf(tmp_path / "mine.gguf", CONFIG, random_tensors(CONFIG))))
    with serve(Hub(MODEL_ID, write_folder(tmp_path / "served", CONFIG, random_tensors(CONFIG)))) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        prepare(MODEL_ID)
    (tmp_path / "cache" / "downloads").mkdir()
    (tmp_path / "cache" / "downloads" / "default.gguf").write_bytes(bytes(1500))
    leftover = tmp_path / "cache" / "models" / ".mine-1.abc"
    leftover.mkdir()
    (leftover / "weights").write_bytes(bytes(700))
    for path in (leftover / "weights", leftover):
        os.utime(path, (1, 1))
    yield tmp_path / "cache"


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["models", "list", "--json"]) == 0
    return {model["name"]: model for model in json.loads(capsys.readouterr().out)}


def named(capsys: pytest.CaptureFixture[str], kind: str) -> str:
    return next(name for name, model in listed(capsys).items() if model["kind"] == kind)


def test_all_that_is_cached_is_listed_with_its_size(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = listed(capsys)
    assert sorted(model["kind"] for model in models.values()) == ["converted", "download", "hub", "leftover"]
    assert models["default.gguf"]["size"] == 1500 and models[".mine-1.abc"]["size"] == 700
    weights = (Path(prepare(MODEL_ID).folder) / "model.safetensors").stat().st_size
    assert weights < models[MODEL_ID]["size"] < weights + 10_000, "a file counts once, not again for its link"
    assert not any(model["is_in_use"] for model in models.values())
    assert run(["models"]) == 0
    shown = capsys.readouterr().out
    assert MODEL_ID in shown and "main (c0ffeec0)" in shown and "mine: llama, float32" in shown and "in all" in shown


def test_a_model_is_shown_with_its_files(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "show", "tiny-labs"]) == 0
    shown = capsys.readouterr().out
    assert str(Path(os.environ["HF_HUB_CACHE"]) / "models--tiny-labs--Tiny") in shown
    assert "/model.safetensors" in shown and "/config.json" in shown
    assert run(["models", "show", "other"]) == 1
    assert "'other' is not cached" in capsys.readouterr().err


def test_pruning_without_names_removes_what_can_be_made_again(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "prune", "--yes"]) == 0
    assert {model["kind"] for model in listed(capsys).values()} == {"download", "hub"}


def test_a_model_of_the_hub_is_removed_by_name(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "prune", MODEL_ID, "--yes"]) == 0
    models = listed(capsys)
    assert MODEL_ID not in models and len(models) == 3


@pytest.mark.parametrize("kind", ["converted", "hub"])
def test_a_model_that_a_server_holds_is_not_removed(
    cache: Path, capsys: pytest.CaptureFixture[str], kind: str, tmp_path: Path
) -> None:
    model = prepare(MODEL_ID if kind == "hub" else str(tmp_path / "mine.gguf"))
    name = named(capsys, kind)
    with hold_model(Path(model.folder)):
        assert listed(capsys)[name]["is_in_use"]
        assert run(["models", "prune", name, "default.gguf", "--yes"]) == 1
        assert f"{name} is in use" in capsys.readouterr().err
        assert run(["models", "prune", "--yes"]) == 0
        models = listed(capsys)
        assert name in models and "default.gguf" in models, "an error comes before anything is removed"
    assert run(["models", "prune", name, "--yes"]) == 0
    assert name not in listed(capsys)


@pytest.mark.parametrize("kind", ["converted", "hub"])
def test_a_model_whose_weights_a_process_has_mapped_is_not_removed(
    cache: Path, capsys: pytest.CaptureFixture[str], kind: str, tmp_path: Path
) -> None:
    model = prepare(MODEL_ID if kind == "hub" else str(tmp_path / "mine.gguf"))
    name = named(capsys, kind)
    with (Path(model.folder) / model.weights[0]).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert listed(capsys)[name]["is_in_use"]
        assert run(["models", "prune", name, "--yes"]) == 1
    assert not listed(capsys)[name]["is_in_use"]


def test_a_conversion_that_may_still_run_is_not_removed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    young = cache / "models" / ".mine-2.def"
    young.mkdir()
    assert not is_abandoned(young)
    assert run(["models", "prune", "--yes"]) == 0
    assert sorted(listed(capsys)) == [".mine-2.def", "default.gguf", MODEL_ID]


def test_a_server_does_not_begin_on_a_folder_that_was_removed(cache: Path, tmp_path: Path) -> None:
    model = prepare(str(tmp_path / "mine.gguf"))
    assert run(["models", "prune", "--yes"]) == 0
    with pytest.raises(StartupError, match="is gone"), hold_model(Path(model.folder)):
        pass


@pytest.mark.parametrize(("answer", "is_removed"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_people_are_asked(
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    is_removed: bool,
) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, answer.encode())
    with os.fdopen(theirs) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        assert run(["models", "prune", "default.gguf"]) == (0 if is_removed else 1)
    os.close(ours)
    assert "Remove this (1.5 kB)?" in capsys.readouterr().out
    assert ("default.gguf" not in listed(capsys)) is is_removed


def test_nothing_is_removed_where_nobody_can_be_asked(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert run(["models", "prune"]) == 1
    assert "--yes" in capsys.readouterr().err
    assert len(listed(capsys)) == 4


def test_empty_caches_are_said_to_be_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert run(["models"]) == 0
    assert "nothing is cached" in capsys.readouterr().out
    assert run(["models", "prune", "--yes"]) == 0
    assert not (tmp_path / "cache").exists()
