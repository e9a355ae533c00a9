"""Reads the facts of this machine for `onward doctor`: packages, processor, memory, devices, folders, ports and limits.

All reading is here. `machine_checks` decides what the values mean.
"""

import errno
import os
import platform
import resource
import shutil
import socket
import stat
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from onward.cli.serve import check_start
from onward.config import RouterConfig, ServeConfig, cache_dir
from onward.errors import StartupError
from onward.models.loader import cuda_probe
from onward.models.loader.model_store import LocalModel, check_local_model
from onward.obs.cgroup_cpu import cpu_quota_cores
from onward.worker.kv_memory_budget import free_memory_bytes

SHM = Path("/dev/shm")
DISTRIBUTION = "onward"


@dataclass(frozen=True, slots=True)
class FolderFacts:
    path: str
    is_writable: bool
    """Whether the folder is writable or, if it does not exist, the closest existing folder above it."""
    used_bytes: int
    free_disk_bytes: int | None
    error: str | None = None
    """Why there can be no such folder; None: it exists, or can be created if it is writable."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    name: str
    error: str | None = None
    """Why `onward serve` would refuse it."""
    found: LocalModel | None = None
    """None: its files are not here yet."""


@dataclass(frozen=True, slots=True)
class PortFacts:
    flag: str
    command: str
    host: str
    port: int
    error: str | None
    """Why nothing can listen there; None: it is free."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    system: str
    """`sys.platform`."""
    has_memory_files: bool
    """Whether the system has `memfd_create`, which KV memory and wires need."""
    python: str
    requires_python: str | None
    requirements: tuple[str, ...]
    """Requirements of the installed distribution, as its metadata has them, with markers."""
    packages: dict[str, str | None]
    """The installed version of every required package; None: not installed."""
    simd: str | None
    simd_error: str | None
    cores: int
    """Cores that this process may run on."""
    cpu_quota: float | None
    """CPU quota of the control groups, in cores. None: there is none."""
    free_memory_bytes: int
    total_memory_bytes: int
    device: str
    """Value of `--device`."""
    cuda_problem: str | None
    flag_error: str | None
    """Why `onward serve` would refuse its flags."""
    model: ModelFacts
    cache: FolderFacts
    has_pip: bool
    ports: tuple[PortFacts, ...]
    shm_bytes: int | None
    open_files: tuple[int, int]
    """The soft and the hard limit of open files."""
    max_connections: int


def read_facts(config: ServeConfig) -> MachineFacts:
    """Reads all facts. `config` is the config that `onward serve` would be started with."""
    simd, simd_error = _simd()
    requirements = tuple(_metadata_requires())
    router = RouterConfig()
    cache = cache_dir()
    return MachineFacts(
        system=sys.platform,
        has_memory_files=hasattr(os, "memfd_create"),
        python=platform.python_version(),
        requires_python=_requires_python(),
        requirements=requirements,
        packages={name: installed_version(name) for name in {package_name(line) for line in requirements}},
        simd=simd,
        simd_error=simd_error,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu_quota=cpu_quota_cores(),
        free_memory_bytes=free_memory_bytes(),
        total_memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        device=config.device,
        cuda_problem=cuda_probe.cuda_problem(),
        flag_error=_flag_error(config),
        model=_model(config),
        cache=_folder(cache),
        has_pip=installed_version("pip") is not None,
        ports=(
            PortFacts("--port", "serve", config.host, config.port, _port_error(config.host, config.port)),
            PortFacts("--port", "router", config.host, router.port, _port_error(config.host, router.port)),
        ),
        shm_bytes=_disk_bytes(SHM, "total"),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        max_connections=config.max_connections,
    )


def package_name(requirement: str) -> str:
    """Returns the name of the package in a requirement: `tokenizers>=0.21; extra == "x"` -> tokenizers."""
    from packaging.requirements import Requirement

    return Requirement(requirement).name


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _metadata_requires() -> list[str]:
    try:
        return metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []  # run from a source folder


def _requires_python() -> str | None:
    try:
        return metadata.metadata(DISTRIBUTION)["Requires-Python"]
    except (metadata.PackageNotFoundError, KeyError):
        return None


def _simd() -> tuple[str | None, str | None]:
    """Returns the vector instructions that kernels would be compiled for, or why none can be chosen."""
    try:
        from onward.kernels.cpu.dot_instruction import best_level
        from onward.kernels.cpu.target import kernel_target

        return f"{best_level()} SIMD, {kernel_target().cpu}", None
    except StartupError as fault:
        return None, fault.message
    except ImportError as fault:
        return None, f"the kernels' compiler cannot be imported: {fault}"


def _flag_error(config: ServeConfig) -> str | None:
    try:
        check_start(config)
    except StartupError as fault:
        return fault.message
    return None


def _model(config: ServeConfig) -> ModelFacts:
    try:
        return ModelFacts(config.model, found=check_local_model(config))
    except StartupError as fault:
        return ModelFacts(config.model, error=fault.message)


def _folder(path: Path) -> FolderFacts:
    """Reads the folder or, if it does not exist, the closest existing one above it."""
    for there in (path, *path.absolute().parents):
        try:
            is_folder = stat.S_ISDIR(there.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            if there.is_symlink():
                return FolderFacts(str(path), False, 0, None, f"{there} is a link to nothing")
            continue
        except OSError as fault:
            return FolderFacts(str(path), False, 0, None, f"{str(there)[:200]}: {fault.strerror}")
        if not is_folder:
            return FolderFacts(str(path), False, 0, None, f"{there} is not a folder")
        is_writable = os.access(there, os.W_OK | os.X_OK)
        return FolderFacts(str(path), is_writable, _used_bytes(path), _disk_bytes(there, "free"))
    raise AssertionError("the root folder exists")


def _used_bytes(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += (Path(folder) / name).lstat().st_blocks * 512
            except OSError:
                continue  # removed meanwhile
    return total


def _disk_bytes(path: Path, what: str) -> int | None:
    try:
        return getattr(shutil.disk_usage(path), what)
    except OSError:
        return None


def _port_error(host: str, port: int) -> str | None:
    """Binds the port for a moment, as `onward serve` would. Returns why that fails, or None."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OverflowError:
            return "no such port: it must be from 0 to 65535"
        except (TypeError, UnicodeError):
            return "no such host name"
        except OSError as fault:
            return "in use" if fault.errno == errno.EADDRINUSE else fault.strerror or str(fault)
    return None
