"""Folders that look like control groups, and the two files of /proc that lead to them."""

from pathlib import Path

MIB = 1 << 20


def write_group(folder: Path, **files: int | str) -> Path:
    """A dot in a file's name is a double underscore here."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")
    return folder


def write_proc(folder: Path, mount: Path, path: str, *, version: int = 2, root: str = "/") -> Path:
    """A process at `path`, where a hierarchy is mounted of which only what is below `root` is seen."""
    folder.mkdir(exist_ok=True)
    line, kind = ("0::", "cgroup2 cgroup2 rw") if version == 2 else ("4:memory:", "cgroup cgroup rw,memory")
    other = "9:name=systemd:/elsewhere\n3:cpu,cpuacct:/elsewhere\n"
    with (folder / "cgroup").open("a") as cgroup, (folder / "mountinfo").open("a") as mounts:
        cgroup.write(f"{other}{line}{path}\n")
        mounts.write("22 1 0:20 / /proc rw,nosuid shared:5 - proc proc rw\n")
        mounts.write(f"30 23 0:27 {root} {mount} rw,nosuid,nodev shared:9 - {kind}\n")
    return folder
