"""The control groups that limit the memory of a process: cgroup versions 1 and 2, also both at once.

A group's limit covers every process below it, so the groups are listed from the process's own one up to the root of the
mount: a systemd slice or the parent of a container may allow less than the process's own group.

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
        """Returns the bytes that the group may still allocate before the kernel kills or throttles its processes.
        Returns None if the group has no limit or its use cannot be read."""
        limit, used = self._limit(), self._number("memory.current", "memory.usage_in_bytes")
        if limit is None or used is None:
            return None
        # The page cache, for example of the model's files, grows up to any limit, and the kernel reclaims it when
        # needed. The kernel's own figure of available memory counts it as free too.
        return max(0, limit - max(0, used - self._file_pages()))

    def oom_kills(self) -> int | None:
        """Returns how many processes of this group any out-of-memory killer has ended, or None if the kernel does not
        report it."""
        counts = self._pairs("memory.events" if self.version == 2 else "memory.oom_control")
        return counts.get("oom_kill")

    def is_hierarchical(self) -> bool:
        """Returns whether the limit applies to groups below: always in version 2, and in version 1 if it is
        hierarchical."""
        return self.version == 2 or self._number("", "memory.use_hierarchy") == 1

    def _limit(self) -> int | None:
        if self.version == 2:
            limits = [_number(self.folder / name) for name in ("memory.max", "memory.high")]
        else:
            # The second value includes the limits of groups that a container does not see.
            own_limit = _number(self.folder / "memory.limit_in_bytes")
            limits = [own_limit, self._pairs("memory.stat").get("hierarchical_memory_limit")]
        return min((limit for limit in limits if limit is not None), default=None)

    def _file_pages(self) -> int:
        """Returns the bytes of files in memory, without memory that processes share without a file."""
        names = ("inactive_file", "active_file") if self.version == 2 else ("total_inactive_file", "total_active_file")
        pairs = self._pairs("memory.stat")
        return sum(pairs.get(name, 0) for name in names)

    def _number(self, version_2: str, version_1: str) -> int | None:
        return _number(self.folder / (version_2 if self.version == 2 else version_1))

    def _pairs(self, name: str) -> dict[str, int]:
        """Returns the lines of the file that are a word and a number."""
        try:
            lines = [line.split() for line in (self.folder / name).read_text().splitlines()]
        except OSError:
            return {}
        return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}


def memory_cgroups(proc: Path = PROC_SELF) -> list[list[MemoryCgroup]]:
    """Returns, for each mounted hierarchy, the group of the process that `proc` describes and then the groups above
    it."""
    return [_cgroup_and_ancestors(*place) for place in cgroup_places(proc, "memory")]


def cgroup_places(proc: Path, controller: str) -> list[tuple[str, str, Path, Version]]:
    """Returns the group of the process in each hierarchy with this controller: its path, the mounted part of the
    hierarchy, the mount point, and the version."""
    try:
        paths = dict(_paths((proc / "cgroup").read_text(), controller))
        mounts = _mounts((proc / "mountinfo").read_text(), controller)
    except OSError:
        return []
    return [(paths[version], root, mount, version) for version, root, mount in mounts if version in paths]


def cgroup_folder(path: str, root: str, mount: Path) -> Path:
    """Returns the folder of a group. If the path belongs to another namespace, it is the mount point, since only the
    mounted part is visible."""
    folder = mount / _below(path, root)
    return folder if folder.is_dir() else mount


def _paths(text: str, controller: str) -> list[tuple[Version, str]]:
    """Returns the group's path by version. `0::/path` is version 2's line; in version 1 each controller has one."""
    found: list[tuple[Version, str]] = []
    for line in text.splitlines():
        hierarchy_id, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy_id == "0" and not controllers:
            found.append((2, path))
        elif controller in controllers.split(","):
            found.append((1, path))
    return found


def _mounts(text: str, controller: str) -> list[tuple[Version, str, Path]]:
    """Returns version, mounted part of the hierarchy, and mount point of each mount with this controller."""
    found: list[tuple[Version, str, Path]] = []
    for line in text.splitlines():
        mount_fields, _, type_fields = line.partition(" - ")
        _, _, _, root, mount, *_ = mount_fields.split(" ")
        file_system, *_, options = type_fields.split(" ")
        if file_system == "cgroup2":
            found.append((2, root, Path(mount)))
        elif file_system == "cgroup" and controller in options.split(","):
            found.append((1, root, Path(mount)))
    return found


def _cgroup_and_ancestors(path: str, root: str, mount: Path, version: Version) -> list[MemoryCgroup]:
    folder = cgroup_folder(path, root, mount)
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
