"""The control groups that limit the memory of a process: cgroup versions 1 and 2, also both at once.

A group's limit covers every process below it, so the groups are listed from the process's own one up to the root of the
mount: a systemd slice or the parent of a container may leave less than the own group says.

    /sys/fs/cgroup                    root of the mount
    └── system.slice                  memory.high
        └── onward.service            memory.max, the process's own group
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

PROC_SELF = Path("/proc/self")

Version = Literal[1, 2]


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    folder: Path
    version: Version

    def headroom_bytes(self) -> int | None:
        """What the group may still allocate before the kernel kills or throttles its processes; None: it has no limit."""
        limit, used = self._limit(), self._number("memory.current", "memory.usage_in_bytes")
        if limit is None or used is None:
            return None
        # Pages of files that were read, such as the model's own, fill any limit in time; they are given back when somebody
        # else needs them. The system's own figure counts them as free too.
        return max(0, limit - max(0, used - self._file_pages()))

    def oom_kills(self) -> int | None:
        """Processes of this group that any out-of-memory killer has ended; None: the kernel does not say."""
        counts = self._pairs("memory.events" if self.version == 2 else "memory.oom_control")
        return counts.get("oom_kill")

    def is_hierarchical(self) -> bool:
        """Whether the limit holds for groups below: always in version 2, and in version 1 where it is hierarchical."""
        return self.version == 2 or self._number("", "memory.use_hierarchy") == 1

    def _limit(self) -> int | None:
        if self.version == 2:
            limits = [_number(self.folder / name) for name in ("memory.max", "memory.high")]
        else:
            # The second one knows the limits of groups that a container does not see.
            own_limit = _number(self.folder / "memory.limit_in_bytes")
            limits = [own_limit, self._pairs("memory.stat").get("hierarchical_memory_limit")]
        return min((limit for limit in limits if limit is not None), default=None)

    def _file_pages(self) -> int:
        """Bytes of files in memory. Memory that processes share without a file is not among them."""
        names = ("inactive_file", "active_file") if self.version == 2 else ("total_inactive_file", "total_active_file")
        pairs = self._pairs("memory.stat")
        return sum(pairs.get(name, 0) for name in names)

    def _number(self, version_2: str, version_1: str) -> int | None:
        return _number(self.folder / (version_2 if self.version == 2 else version_1))

    def _pairs(self, name: str) -> dict[str, int]:
        """The file's lines of a word and a number."""
        try:
            lines = [line.split() for line in (self.folder / name).read_text().splitlines()]
        except OSError:
            return {}
        return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}


def memory_cgroups(proc: Path = PROC_SELF) -> list[list[MemoryCgroup]]:
    """For each mounted hierarchy: the group of the process that `proc` describes, then those above it."""
    try:
        paths = dict(_paths((proc / "cgroup").read_text()))
        mounts = _mounts((proc / "mountinfo").read_text())
    except OSError:
        return []
    return [
        _cgroup_and_ancestors(paths[version], root, mount, version)
        for version, root, mount in mounts
        if version in paths
    ]


def _paths(text: str) -> list[tuple[Version, str]]:
    """`0::/path` is version 2's line; in version 1 the memory controller has one."""
    found: list[tuple[Version, str]] = []
    for line in text.splitlines():
        hierarchy_id, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy_id == "0" and not controllers:
            found.append((2, path))
        elif "memory" in controllers.split(","):
            found.append((1, path))
    return found


def _mounts(text: str) -> list[tuple[Version, str, Path]]:
    """Version, which part of the hierarchy is mounted, and where."""
    found: list[tuple[Version, str, Path]] = []
    for line in text.splitlines():
        mount_fields, _, type_fields = line.partition(" - ")
        _, _, _, root, mount, *_ = mount_fields.split(" ")
        file_system, *_, options = type_fields.split(" ")
        if file_system == "cgroup2":
            found.append((2, root, Path(mount)))
        elif file_system == "cgroup" and "memory" in options.split(","):
            found.append((1, root, Path(mount)))
    return found


def _cgroup_and_ancestors(path: str, root: str, mount: Path, version: Version) -> list[MemoryCgroup]:
    folder = mount / _below(path, root)
    if not folder.is_dir():
        folder = mount  # the path is another namespace's; what is mounted is what there is to see
    groups = [MemoryCgroup(folder, version)]
    while folder != mount:
        folder = folder.parent
        group = MemoryCgroup(folder, version)
        if not group.is_hierarchical():
            break
        groups.append(group)
    return groups


def _below(path: str, root: str) -> PurePosixPath:
    relative = PurePosixPath(path)
    if not relative.is_relative_to(root) or ".." in relative.parts:
        return PurePosixPath()
    return relative.relative_to(root)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
