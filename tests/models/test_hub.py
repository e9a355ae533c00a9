import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import snapshot_download

from onward.cli.main import run
from onward.errors import StartupError
from onward.models.loader.model_store import prepare
from onward.models.loader.weights import open_weights
from onward.text.gguf_tokenizer import build_tokenizer
from tests.e2e.test_read_only_cache import make_read_only
from tests.models.checkpoints import GPT2_TOKENIZER, hf_json, random_tensors, tiny_config, write_folder
from tests.models.hub_server import COMMIT, Hub, serve

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
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub-cache"))
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


def test_a_float_model_is_refused_without_torch_when_only_its_config_was_fetched(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(StartupError, match=rf"{MODEL_ID} \(float weights, on CPU\) needs torch.*--quantization int8"):
        prepare(MODEL_ID, cache_dir=tmp_path / "cache")
    assert [hub.downloads(shard) for shard in SHARDS] == [[], [], []]


def test_an_unknown_id_is_reported_in_one_line(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot fetch nobody/nothing") as refused:
        prepare("nobody/nothing", cache_dir=tmp_path / "cache")
    assert "\n" not in str(refused.value)


def test_a_cache_that_cannot_be_written_is_no_fault_of_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the cache folder should be")
    monkeypatch.setenv("HF_HUB_CACHE", str(blocked))
    with pytest.raises(StartupError, match="set HF_HUB_CACHE to another one") as refused:
        prepare(MODEL_ID, cache_dir=tmp_path / "cache")
    assert "Hugging Face hub" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MysteryForCausalLM"]}, "MysteryForCausalLM"),
        ({"quantization_config": {"quant_method": "mystery"}}, "quantization_config .*mystery"),
        ({"rope_scaling": {"rope_type": "mystery", "factor": 2.0}}, "mystery"),
        ({"hidden_act": "mystery"}, "hidden_act"),
        ({"hidden_size": -1}, "hidden_size"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_served_is_refused_before_anything_else_is_fetched(
    hub: Hub, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    (hub.folder / "config.json").write_text(json.dumps(hf_json(CONFIG, **changes)))
    with pytest.raises(StartupError, match=named):
        prepare(MODEL_ID, cache_dir=tmp_path / "cache")
    assert hub.fetched() == {"config.json"}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"max_model_len": 10**6}, "--max-model-len 1000000"),
        ({"device": "cuda", "quantization": "int8"}, "--quantization int8"),
        ({"device": "cuda", "deterministic": True, "dtype": "float16"}, "--dtype float16"),
        ({"chat_template": "/no/such/file.jinja"}, "--chat-template"),
        ({"revision": "../../escape"}, "--revision"),
    ],
    ids=str,
)
def test_flags_that_cannot_work_are_refused_before_anything_large_is_fetched(
    hub: Hub, tmp_path: Path, asked: dict[str, Any], named: str
) -> None:
    with pytest.raises(StartupError, match=named):
        prepare(MODEL_ID, cache_dir=tmp_path / "cache", **asked)
    assert hub.fetched() <= {"config.json"}


def test_a_device_that_is_not_there_is_reported_before_the_hub_is_asked(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run(["serve", "--model", MODEL_ID, "--device", "cuda", "--port", "0"]) == 1
    assert "onward serve: --device cuda: " in capsys.readouterr().err
    assert hub.requests == []


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("tokenizer.model", b"\x0a\x03\x0a\x01a", "remove_extra_whitespaces"),
        ("tokenizer.json", b"{}", "tokenizer"),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja"),
        ("generation_config.json", b'{"top_p": 7}', "top_p"),
    ],
)
def test_a_description_that_cannot_be_used_is_refused_before_weights_are_fetched(
    hub: Hub, tmp_path: Path, file: str, content: bytes, named: str
) -> None:
    (hub.folder / file).write_bytes(content)
    with pytest.raises(StartupError, match=named):
        prepare(MODEL_ID, cache_dir=tmp_path / "cache")
    assert file in hub.fetched()
    assert not [name for name in hub.fetched() if name.endswith(".safetensors")]


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["config.json", "pytorch_model.bin"], "no weights in safetensors"),
        (["a.Q4_0.gguf", "README.md"], r"GGUF files only \(a\.Q4_0\.gguf"),
        (["README.md"], r"no config\.json"),
    ],
)
def test_a_repository_without_a_model_is_refused_by_its_list_of_files(
    hub: Hub, tmp_path: Path, files: list[str], named: str
) -> None:
    hub.folder = tmp_path / "other"
    hub.folder.mkdir()
    for name in files:
        (hub.folder / name).write_text("{}")
    with pytest.raises(StartupError, match=named):
        prepare(MODEL_ID, cache_dir=tmp_path / "cache")
    assert hub.fetched() == set()


def test_models_lie_in_the_standard_cache(hub: Hub, tmp_path: Path) -> None:
    model = prepare(MODEL_ID, cache_dir=tmp_path / "cache")
    repository = tmp_path / "hub-cache" / "models--tiny-labs--Tiny-Qwen3.1"
    assert Path(model.folder) == repository / "snapshots" / COMMIT
    assert (repository / "refs" / "main").read_text() == COMMIT
    assert (Path(model.folder) / SHARDS[0]).resolve().parent == repository / "blobs"


@pytest.mark.parametrize("variables", [{"HF_HOME": "home"}, {"XDG_CACHE_HOME": "xdg"}])
def test_the_cache_is_where_hugging_face_has_it(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    model = prepare(MODEL_ID, load_format="dummy", cache_dir=tmp_path / "cache")
    below = {"HF_HOME": "home/hub", "XDG_CACHE_HOME": "xdg/huggingface/hub"}[next(iter(variables))]
    assert Path(model.folder).is_relative_to(tmp_path / below)


def test_a_revision_is_fetched_and_kept_beside_others(hub: Hub, tmp_path: Path) -> None:
    changed = random_tensors(CONFIG, seed=1)
    commit = "ab" * 20
    hub.revisions["v2"] = (commit, write_folder(tmp_path / "v2", CONFIG, changed))
    first = prepare(MODEL_ID, cache_dir=tmp_path / "cache")
    for revision in ("v2", commit):
        second = prepare(MODEL_ID, revision=revision, cache_dir=tmp_path / "cache")
        assert (second.name, Path(second.folder).name) == (MODEL_ID, commit)
        assert second.fingerprint != first.fingerprint
    hub.requests.clear()
    assert prepare(MODEL_ID, cache_dir=tmp_path / "cache").folder == first.folder
    assert prepare(MODEL_ID, revision="v2", cache_dir=tmp_path / "cache").folder == second.folder
    assert hub.requests == []


def test_an_unknown_revision_is_named(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"revision v3") as refused:
        prepare(MODEL_ID, revision="v3", cache_dir=tmp_path / "cache")
    assert "\n" not in str(refused.value)
    assert hub.fetched() == set()


def test_a_branch_that_moves_does_not_change_what_is_served(hub: Hub, tmp_path: Path) -> None:
    first = prepare(MODEL_ID, cache_dir=tmp_path / "cache")
    hub.revisions["main"] = ("cd" * 20, write_folder(tmp_path / "new", CONFIG, random_tensors(CONFIG, seed=1)))
    assert prepare(MODEL_ID, cache_dir=tmp_path / "cache") == first


def write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(build_tokenizer(GPT2_TOKENIZER).to_str())


def test_a_model_that_another_program_has_fetched_is_served_without_a_request(hub: Hub, tmp_path: Path) -> None:
    write_tokenizer(hub.folder)
    snapshot_download(MODEL_ID, cache_dir=tmp_path / "hub-cache", endpoint=hub.url)
    hub.requests.clear()
    assert_fetched(tmp_path / "cache")
    assert hub.requests == []


def test_a_part_that_another_program_has_fetched_is_completed(hub: Hub, tmp_path: Path) -> None:
    snapshot_download(
        MODEL_ID, cache_dir=tmp_path / "hub-cache", endpoint=hub.url, allow_patterns=["config.json", SHARDS[0]]
    )
    hub.requests.clear()
    assert_fetched(tmp_path / "cache")
    assert [len(hub.downloads(shard)) for shard in SHARDS] == [0, 1, 1]


def test_a_hub_that_is_down_is_no_reason_not_to_serve_what_is_there(hub: Hub, tmp_path: Path) -> None:
    """Whether the model has a tokenizer is not known without the hub; its weights are all there."""
    snapshot_download(MODEL_ID, cache_dir=tmp_path / "hub-cache", endpoint=hub.url)
    hub.is_down = True
    assert_fetched(tmp_path / "cache")
    shutil.rmtree(tmp_path / "hub-cache")
    with pytest.raises(StartupError, match=f"cannot fetch {MODEL_ID}"):
        prepare(MODEL_ID, cache_dir=tmp_path / "cache")


def test_offline_means_that_no_request_is_made(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(StartupError, match=f"{MODEL_ID} is not complete in .*HF_HUB_OFFLINE"):
        prepare(MODEL_ID, cache_dir=tmp_path / "cache")
    assert hub.requests == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    prepare(MODEL_ID, cache_dir=tmp_path / "cache")
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_fetched(tmp_path / "elsewhere")
    assert hub.requests == []


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_complete_read_only_cache_is_enough(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    """Both caches, and a tokenizer that was built into one of them. Every write would fail, and none is tried."""
    config = tiny_config(hidden_size=64, intermediate_size=128, head_dim=16)
    write_folder(hub.folder, config, random_tensors(config), num_shards=3)
    write_tokenizer(hub.folder)
    (hub.folder / "tokenizer_config.json").write_text(json.dumps({"extra_special_tokens": ["<|added|>"]}))
    both = tmp_path / "caches"
    monkeypatch.setenv("HF_HUB_CACHE", str(both / "hub"))
    monkeypatch.setenv("ONWARD_CACHE", str(both / "onward"))
    prepared = prepare(MODEL_ID, quantization=quantization)
    hub.is_down = True
    make_read_only(both, tmp_path / "site", monkeypatch)
    script = (
        "import sys; from onward.models.loader.model_store import prepare;"
        "from onward.models.loader.weights import open_weights; from onward.text.tokenizer import Tokenizer;"
        f"from pathlib import Path; model = prepare({MODEL_ID!r}, quantization={quantization!r});"
        "tokenizer = Tokenizer.from_file(Path(model.folder) / model.tokenizer);"
        "print(model.fingerprint, len(dict(open_weights(model))) > 0, tokenizer.token_id('<|added|>') is not None)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.stdout.split() == [prepared.fingerprint, "True", "True"], ended.stderr
    assert "not kept" not in ended.stderr, "nothing had to be written"


def test_a_size_that_a_device_cannot_have_is_refused_before_anything_else_is_fetched(hub: Hub, tmp_path: Path) -> None:
    config = tiny_config(hidden_size=24, num_heads=3, num_kv_heads=1)
    (hub.folder / "config.json").write_text(json.dumps(hf_json(config)))
    with pytest.raises(StartupError, match="hidden_size is 24"):
        prepare(MODEL_ID, quantization="int8", cache_dir=tmp_path / "cache")
    assert hub.fetched() == {"config.json"}
