"""The processor time that control groups allow a process. A container with a quota has less than the cores it sees."""

from pathlib import Path

from onward.obs.cgroup_memory import PROC_SELF, Version, cgroup_folder, cgroup_places


def cpu_quota_cores(proc: Path = PROC_SELF) -> float | None:
    """Returns the tightest quota of the groups that the process is in, in cores, or None if no group has one."""
    quotas: list[float] = []
    for path, root, mount, version in cgroup_places(proc, "cpu"):
        folder = cgroup_folder(path, root, mount)
        for group in [folder, *(above for above in folder.parents if above.is_relative_to(mount))]:
            if (quota := _quota(group, version)) is not None:
                quotas.append(quota)
    return min(quotas, default=None)


def _quota(folder: Path, version: Version) -> float | None:
    """Returns the quota of one group. Version 2 has both numbers in one file, version 1 has a file for each. Without a
    quota, version 2 has `max` and version 1 has -1."""
    names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        words = " ".join((folder / name).read_text() for name in names).split()
    except OSError:
        return None
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])
