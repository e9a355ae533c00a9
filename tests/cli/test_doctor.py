"""What `onward doctor` makes of a machine: each fact by itself, and this machine as it is."""

import dataclasses
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onward.cli.machine_checks import CheckLevel, MachineCheck, can_serve, check_machine
from onward.cli.machine_facts import FolderFacts, MachineFacts, ModelFacts, PortFacts, read_facts
from onward.cli.main import run
from onward.config import DEFAULT_MODEL, ServeConfig
from onward.models.loader.model_store import LocalModel
from onward.text.gguf_tokenizer import build_tokenizer
from tests.models.checkpoints import GPT2_TOKENIZER, random_tensors, tiny_config, write_folder

GIB = 1 << 30
HEALTHY = MachineFacts(
    system="linux",
    has_memory_files=True,
    python="3.12.4",
    requires_python=">=3.11",
    requirements=(
        "numpy>=2.0",
        "llguidance<2,>=1.9",
        'uvloop>=0.21; sys_platform != "win32"',
        'colorama>=1; sys_platform == "win32"',
        'torch<2.14,>=2.11; extra == "torch"',
        'onward[torch]; extra == "cuda"',
        'triton>=3.6; extra == "cuda"',
        'nixl>=1.0; extra == "nixl"',
        'opentelemetry-sdk>=1.30; extra == "otel"',
    ),
    packages={
        "numpy": "2.3.1",
        "llguidance": "1.9.0",
        "uvloop": "0.21.0",
        "colorama": None,
        "onward": "0.1.0",
        **dict.fromkeys(("torch", "triton", "nixl", "opentelemetry-sdk")),
    },
    simd="vnni SIMD, rocketlake",
    simd_error=None,
    cores=8,
    cpu_quota=None,
    free_memory_bytes=16 * GIB,
    total_memory_bytes=32 * GIB,
    device="cpu",
    cuda_problem="torch is not installed",
    flag_error=None,
    model=ModelFacts("m", found=LocalModel("m", "llama", "int8", has_tokenizer=True)),
    cache=FolderFacts("/cache", True, 200 << 20, 50 * GIB),
    has_pip=True,
    ports=(
        PortFacts("--port", "serve", "127.0.0.1", 8000, None),
        PortFacts("--port", "router", "127.0.0.1", 8080, None),
    ),
    shm_bytes=64 << 20,
    open_files=(1024, 1 << 20),
    max_connections=4096,
)


def with_packages(**versions: str | None) -> dict[str, str | None]:
    return HEALTHY.packages | versions


def only_complaint(**changes: Any) -> MachineCheck:
    """Returns the only complaint about a machine that is healthy but for these facts."""
    checks = check_machine(dataclasses.replace(HEALTHY, **changes))
    [complaint] = [check for check in checks if check.level is not CheckLevel.OK]
    assert complaint.advice, "every complaint comes with what to do"
    assert can_serve(checks) is (complaint.level is CheckLevel.WARNING)
    return complaint


def test_a_healthy_machine_has_nothing_but_good_lines() -> None:
    checks = check_machine(HEALTHY)
    assert {check.level for check in checks} == {CheckLevel.OK} and can_serve(checks)
    assert not any(check.advice for check in checks)


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"system": "darwin", "has_memory_files": False}, "problem", ("darwin", "Linux")),
        ({"python": "3.10.2"}, "problem", ("3.10.2", ">=3.11")),
        ({"packages": with_packages(numpy="1.26")}, "problem", ("numpy 1.26", ">=2.0")),
        ({"packages": with_packages(uvloop=None)}, "problem", ("uvloop is not installed",)),
        ({"packages": with_packages(torch="2.14.0")}, "warning", ("torch", "2.14.0", "<2.14")),
        ({"simd": None, "simd_error": "ONWARD_SIMD=avx2: this CPU lacks avx2"}, "problem", ("lacks avx2",)),
        ({"simd": "plain SIMD, generic"}, "warning", ("plain",)),
        ({"cpu_quota": 2.5}, "warning", ("8 cores", "2.5", "--threads 2")),
        ({"cpu_quota": 0.3}, "warning", ("--threads 1",)),
        ({"free_memory_bytes": 300 << 20}, "problem", ("300 MiB",)),
        ({"free_memory_bytes": GIB}, "warning", ("1,024 MiB",)),
        ({"device": "cuda"}, "problem", ("torch is not installed", "--device cpu")),
        ({"cache": FolderFacts("/c", False, 0, GIB)}, "problem", ("/c", "ONWARD_CACHE")),
        ({"cache": FolderFacts("/c", False, GIB, 0)}, "warning", ("read-only",)),
        ({"cache": FolderFacts("/c", True, GIB, GIB // 2)}, "warning", ("0.5 GiB", "onward models")),
        ({"cache": FolderFacts("/c", False, 0, None, "/c is not a folder")}, "problem", ("/c is not", "ONWARD_CACHE")),
        ({"model": ModelFacts(DEFAULT_MODEL), "has_pip": False}, "warning", ("pip",)),
        ({"model": ModelFacts("m", error="m has no config.json")}, "problem", ("m has no config.json", "--model")),
        ({"model": ModelFacts("m", found=LocalModel("m", "llama", "int8", False))}, "warning", ("tokenizer.json",)),
        ({"flag_error": "--max-connections 0 is not positive"}, "problem", ("--max-connections 0",)),
        ({"shm_bytes": None}, "warning", ("/dev/shm",)),
        ({"open_files": (1024, 2048)}, "warning", ("2,048", "768 connections")),
    ],
    ids=str,
)
def test_each_fact_has_its_level_and_its_advice(changes: dict[str, Any], level: str, words: tuple[str, ...]) -> None:
    complaint = only_complaint(**changes)
    assert complaint.level == level
    text = f"{complaint.name} {complaint.message} {complaint.advice}"
    assert not [word for word in words if word not in text], text


@pytest.mark.parametrize(("number", "level"), [(0, "problem"), (1, "warning")])
def test_a_port_in_use_stops_the_server_it_is_for(number: int, level: str) -> None:
    ports = list(HEALTHY.ports)
    ports[number] = dataclasses.replace(ports[number], error="in use")
    assert only_complaint(ports=tuple(ports)).level == level


def test_extras_are_listed_with_their_purpose() -> None:
    packages = with_packages(torch="2.12.0", triton="3.6.0")
    [line] = [
        check.message
        for check in check_machine(dataclasses.replace(HEALTHY, packages=packages))
        if check.name == "extras"
    ]
    installed, missing = line.split("; ")
    assert installed == "installed: torch (float models on CPU), cuda (CUDA devices)"
    assert "nixl" in missing and "otel" in missing


def test_limits_that_are_no_numbers_are_no_limits() -> None:
    assert can_serve(check_machine(dataclasses.replace(HEALTHY, open_files=(-1, -1), cpu_quota=8.0)))


def test_it_reads_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "deep" / "cache"))
    facts = read_facts(ServeConfig(port=0))
    assert facts.cache == dataclasses.replace(facts.cache, path=str(tmp_path / "deep" / "cache"), used_bytes=0)
    assert not (tmp_path / "deep").exists(), "it only looks"
    assert facts.cores >= 1 and facts.total_memory_bytes >= facts.free_memory_bytes > 0
    assert facts.simd is not None and facts.packages["numpy"] is not None
    assert (facts.model, facts.flag_error) == (ModelFacts(DEFAULT_MODEL), None)


def test_a_script_reads_json_and_the_exit_status(
    unused_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path))
    assert run(["doctor", "--json", "--port", str(unused_port)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["can_serve"] is True
    assert {"name", "level", "message", "advice"} == set(shown["checks"][0])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", unused_port))
        taken.listen()
        assert run(["doctor", "--port", str(unused_port)]) == 1
    text = capsys.readouterr().out
    assert f"problem  ports          127.0.0.1:{unused_port}, for `onward serve`: in use" in text
    assert "onward serve would not start: 1 problem(s)" in text


def a_link_to_itself(folder: Path) -> Path:
    (folder / "loop").symlink_to("loop")
    return folder / "loop"


def a_link_to_nothing(folder: Path) -> Path:
    (folder / "link").symlink_to(folder / "nothing")
    return folder / "link" / "cache"


def a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file" / "cache"


def a_long_name(folder: Path) -> Path:
    return folder / ("a" * 300)


@pytest.mark.parametrize("make", [a_link_to_itself, a_link_to_nothing, a_file, a_long_name])
def test_a_cache_folder_that_cannot_be_is_a_problem(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path], Path],
) -> None:
    monkeypatch.setenv("ONWARD_CACHE", str(make(tmp_path)))
    assert run(["doctor", "--json", "--port", "0"]) == 1
    [problem] = problems(capsys)
    assert problem["name"] == "cache" and "ONWARD_CACHE" in problem["advice"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--port", "70000"], "--port 70000 is not within 0 to 65535"),
        (["--port", "0", "--max-connections", "0"], "--max-connections"),
        (["--port", "0", "--host", "ä..x", "--insecure"], "no such host name"),
        (["--port", "0", "--host", "0.0.0.0"], "there are no API keys"),
    ],
)
def test_flags_that_a_server_refuses_are_a_problem(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    named: str,
) -> None:
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path))
    assert run(["doctor", "--json", *flags]) == 1
    assert any(named in problem["message"] for problem in problems(capsys))


def test_a_model_is_checked_as_a_start_checks_it_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "cache"))
    config = tiny_config()
    folder = write_folder(tmp_path / "m", config, random_tensors(config))
    (folder / "tokenizer.json").write_text(build_tokenizer(GPT2_TOKENIZER).to_str())
    assert run(["doctor", "--json", "--port", "0", str(folder)]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["message"] for check in checks if check["name"] == "model"] == ["m: llama, float32"]
    for file, content, named in (
        ("tokenizer.json", b"{", "tokenizer.json"),
        ("model.safetensors", b"x", "model.safetensors"),
        ("config.json", b"{}", "architecture"),
    ):
        (folder / file).write_bytes(content)
        assert run(["doctor", "--json", "--port", "0", str(folder)]) == 1
        [problem] = problems(capsys)
        assert problem["name"] == "model" and named in problem["message"]
    assert not (tmp_path / "cache").exists()


def problems(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    return [check for check in json.loads(capsys.readouterr().out)["checks"] if check["level"] == "problem"]
