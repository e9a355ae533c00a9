"""The default install has no torch: int8 is converted, served and used without it, and what needs it names the extra."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from onward.cli.main import run
from onward.config import DEFAULT_MODEL, cache_dir
from onward.errors import InvalidRequest, StartupError
from onward.llm import LLM
from onward.models.loader.model_store import prepare
from onward.models.loader.weights import open_weights
from tests.e2e.server import Server
from tests.models.checkpoints import random_tensors, tiny_config, write_folder, write_gguf
from tests.models.default_model import default_model
from tests.models.published_checkpoints import write_published

ROOT = Path(__file__).parents[2]
LEFT_OUT = ("torch", "triton", "transformers")
NOT_THERE = f"import sys\nsys.modules.update(dict.fromkeys({LEFT_OUT!r}))\n"
"""Python takes a module that is None here for one that cannot be found."""

IMPORT_EVERYTHING = """
import argparse, sys
from onward.cli.main import COMMANDS, module_of
for command in COMMANDS:
    module_of(command).add_arguments(argparse.ArgumentParser())
import onward.api.main, onward.engine.main, onward.llm, onward.router.main, onward.stream_store.main, onward.worker.main
print(*{"torch", "triton", "transformers", "numba"} & set(sys.modules))
"""


@pytest.fixture
def torchless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For processes that are started: no torch, and a cache with nothing but the downloaded file and compiled kernels."""
    site, cache = tmp_path / "site", tmp_path / "cache"
    site.mkdir()
    cache.mkdir()
    (site / "sitecustomize.py").write_text(NOT_THERE)
    default_model("int8")
    for name in ("downloads", "kernels"):
        (cache_dir() / name).mkdir(exist_ok=True)
        (cache / name).symlink_to(cache_dir() / name)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT)]))
    monkeypatch.setenv("ONWARD_CACHE", str(cache))
    return cache


@pytest.fixture
def no_torch_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LEFT_OUT:
        monkeypatch.setitem(sys.modules, name, None)


def onward(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "onward.cli.main", *words], capture_output=True, text=True, timeout=120
    )


def python(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.usefixtures("torchless")
def test_the_default_model_is_converted_and_served_without_torch(tmp_path: Path) -> None:
    assert "ModuleNotFoundError" in python("import torch").stderr
    with Server() as server:
        assert "converting the weights" in server.log()
        body = {
            "model": DEFAULT_MODEL,
            "prompt": "The capital of France is",
            "max_tokens": 8,
            "temperature": 0,
            "logprobs": 2,
        }
        status, answer = server.post("/v1/completions", body)
        assert status == 200 and "Paris" in answer["choices"][0]["text"]
        assert server.post("/v1/embeddings", {"model": DEFAULT_MODEL, "input": "text"})[0] == 200
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}}}
        chat = {
            "model": DEFAULT_MODEL,
            "messages": [{"role": "user", "content": "Is it?"}],
            "max_tokens": 16,
            "response_format": schema,
        }
        assert server.post("/v1/chat/completions", chat)[0] == 200
        assert onward("bench", "--url", server.url, "--requests", "1", "--output-tokens", "4").returncode == 0
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}
        (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
        ended = onward("run-batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--url", server.url)
        assert ended.returncode == 0, ended.stderr
    assert onward("sim", "--runs", "1", "--shape", "engine").returncode == 0


def test_no_command_and_no_process_imports_torch_before_it_is_needed() -> None:
    ended = python(IMPORT_EVERYTHING)
    assert (ended.returncode, ended.stdout.split()) == (0, []), ended.stderr


@pytest.mark.parametrize("command", ["serve", "up"])
def test_a_server_that_needs_torch_names_the_extra_in_one_line(torchless: Path, command: str) -> None:
    for link in torchless.iterdir():
        link.unlink()
    ended = onward(command, "--quantization", "none")
    assert ended.returncode == 1
    [line] = ended.stderr.strip().splitlines()
    assert line.startswith(f"onward {command}: --quantization none needs torch") and "onward[torch]" in line
    assert not list(torchless.iterdir()), "something was fetched before"


@pytest.mark.usefixtures("no_torch_here")
@pytest.mark.parametrize(
    ("flags", "extra", "names"),
    [
        (["--quantization", "none"], "onward[torch]", "--quantization none"),
        (["--device", "cuda"], "onward[cuda]", "--device cuda"),
        (["--speculative", "eagle:/nowhere:1"], "onward[torch]", "--speculative eagle:/nowhere:1"),
    ],
)
def test_each_flag_that_needs_torch_names_the_extra_before_anything_is_fetched(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    extra: str,
    names: str,
) -> None:
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "cache"))
    assert run(["warm", *flags]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert extra in line and names in line
    assert not list(tmp_path.iterdir()), "something was fetched before"


@pytest.mark.usefixtures("no_torch_here")
def test_the_library_names_the_extra_too(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"onward\[torch\]"):
        LLM(DEFAULT_MODEL, cache_dir=tmp_path, quantization="none")
    with pytest.raises(InvalidRequest, match=r"speculative: .*onward\[torch\]"):
        LLM(DEFAULT_MODEL, cache_dir=tmp_path, speculative="eagle:/nowhere:1")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_torch_here")
def test_a_gguf_file_of_floats_is_refused_when_its_header_is_read(tmp_path: Path) -> None:
    config = tiny_config()
    file = write_gguf(tmp_path / "floats.gguf", config, random_tensors(config))
    with pytest.raises(
        StartupError, match=r"floats\.gguf \(float weights, on CPU\).*onward\[torch\].*--quantization int8"
    ):
        prepare(str(file), cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache" / "models").exists()
    assert prepare(str(file), quantization="int8", cache_dir=tmp_path / "cache").weights


@pytest.mark.usefixtures("no_torch_here")
def test_a_folder_of_floats_is_refused_by_its_config(tmp_path: Path) -> None:
    config = tiny_config()
    folder = write_folder(tmp_path / "floats", config, random_tensors(config))
    for load_format in ("auto", "dummy"):
        with pytest.raises(StartupError, match=r"floats \(float weights, on CPU\) needs torch.*--quantization int8"):
            prepare(str(folder), load_format=load_format, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("no_torch_here")
def test_a_quantized_folder_is_converted_without_a_flag(tmp_path: Path) -> None:
    config = tiny_config(hidden_size=64, intermediate_size=128, head_dim=32)
    write_published(tmp_path / "awq", config, "awq")
    model = prepare(str(tmp_path / "awq"), cache_dir=tmp_path / "cache")
    assert (model.quantization, "int4-zero" in model.weight_formats) == ("int8", True)
    assert len(dict(open_weights(model))) > 0


def test_nothing_that_the_default_install_depends_on_brings_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    seen: set[str] = set()
    wanted = [_name(line) for line in project["dependencies"]]
    while wanted:
        name = wanted.pop()
        if name not in seen:
            seen.add(name)
            wanted += [_name(line) for line in _requirements(name) if "extra ==" not in line]
    assert {"numpy", "tokenizers", "starlette"} <= seen
    assert not seen & set(LEFT_OUT)


def _requirements(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []  # for another platform or Python


def _name(requirement: str) -> str:
    [name] = re.findall(r"^[\w.-]+", requirement)
    return name.lower().replace("_", "-")
