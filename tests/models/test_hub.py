import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from onward.errors import StartupError
from onward.models.loader.model_store import prepare
from onward.models.loader.weights import open_weights
from tests.models.checkpoints import random_tensors, tiny_config, write_folder
from tests.models.hub_server import Hub, serve

CONFIG = tiny_config("qwen3")
TENSORS = random_tensors(CONFIG)
MODEL_ID = "tiny-labs/Tiny-Qwen3.1"
SHARDS = [f"model-{i}-of-00003.safetensors" for i in ("00001", "00002", "00003")]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = write_folder(tmp_path / "hub", CONFIG, TENSORS, num_shards=3)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    (folder / "modeling_tiny.py").write_text("raise SystemExit")
    with serve(Hub(MODEL_ID, folder)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def assert_fetched(cache: Path) -> None:
    weights = open_weights(prepare(MODEL_ID, cache_dir=cache))
    assert set(weights) == set(TENSORS)
    for name, array in TENSORS.items():
        np.testing.assert_array_equal(np.asarray(weights[name]), array)


def test_a_sharded_model_is_fetched_by_its_id(hub: Hub, tmp_path: Path) -> None:
    heard: list[tuple[str, float | None]] = []
    model = prepare(MODEL_ID, cache_dir=tmp_path / "cache", progress=lambda *said: heard.append(said))
    assert (model.name, model.config, model.weights) == (MODEL_ID, CONFIG, SHARDS)
    assert any(message == f"downloading {MODEL_ID}" and fraction == 1.0 for message, fraction in heard)
    assert_fetched(tmp_path / "cache")


def test_code_and_pickled_weights_are_not_downloaded(hub: Hub, tmp_path: Path) -> None:
    prepare(MODEL_ID, cache_dir=tmp_path / "cache")
    assert hub.downloads("pytorch_model.bin") == []
    assert hub.downloads("modeling_tiny.py") == []


def test_the_second_time_no_request_is_made(hub: Hub, tmp_path: Path) -> None:
    prepare(MODEL_ID, cache_dir=tmp_path / "cache")
    hub.requests.clear()
    assert_fetched(tmp_path / "cache")
    assert hub.requests == []


def test_a_download_that_breaks_off_goes_on_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    """The library writes pieces of 10 MiB, so the shard must be larger for a part of it to be kept."""
    config = tiny_config("qwen3", vocab_size=100_000)
    tensors = random_tensors(config)
    write_folder(hub.folder, config, tensors, num_shards=3)
    shard = max(SHARDS, key=lambda name: (hub.folder / name).stat().st_size)
    hub.break_once[shard] = 11 << 20
    weights = open_weights(prepare(MODEL_ID, cache_dir=tmp_path / "cache"))
    for name, array in tensors.items():
        np.testing.assert_array_equal(np.asarray(weights[name]), array)
    assert hub.downloads(shard) == [None, f"bytes={10 << 20}-"]


def test_after_a_failed_attempt_only_what_is_missing_is_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.failing.add(SHARDS[2])
    with pytest.raises(StartupError, match=MODEL_ID) as refused:
        prepare(MODEL_ID, cache_dir=tmp_path / "cache")
    assert "\n" not in str(refused.value)
    hub.failing.clear()
    assert_fetched(tmp_path / "cache")
    assert [len(hub.downloads(shard)) for shard in SHARDS[:2]] == [1, 1]


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, 100)


@pytest.mark.parametrize("damage", [remove, cut])
def test_a_file_damaged_in_the_cache_is_fetched_again(hub: Hub, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    model = prepare(MODEL_ID, cache_dir=tmp_path / "cache")
    damage(Path(model.folder) / SHARDS[0])
    assert_fetched(tmp_path / "cache")


def test_dummy_weights_are_not_downloaded(hub: Hub, tmp_path: Path) -> None:
    model = prepare(MODEL_ID, load_format="dummy", cache_dir=tmp_path / "cache")
    assert model.config == CONFIG
    assert [hub.downloads(shard) for shard in SHARDS] == [[], [], []]
    assert_fetched(tmp_path / "cache")


def test_an_unknown_id_is_reported_in_one_line(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot fetch nobody/nothing") as refused:
        prepare("nobody/nothing", cache_dir=tmp_path / "cache")
    assert "\n" not in str(refused.value)


def test_a_cache_that_cannot_be_written_is_no_fault_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the cache folder should be")
    with pytest.raises(StartupError, match="set ONWARD_CACHE to another one") as refused:
        prepare(MODEL_ID, cache_dir=blocked)
    assert "Hugging Face hub" not in str(refused.value)
