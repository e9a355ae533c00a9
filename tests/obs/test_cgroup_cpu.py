"""How much processor time control groups leave a process."""

from pathlib import Path

import pytest

from onward.obs.cgroup_cpu import cpu_quota_cores
from tests.obs.control_groups import write_group, write_proc


@pytest.mark.parametrize(
    ("own", "above", "expected"),
    [
        ("150000 100000", "max 100000", 1.5),
        ("max 100000", "200000 100000", 2.0),
        ("400000 100000", "50000 100000", 0.5),
        ("max 100000", "max 100000", None),
        ("nonsense", "1 0", None),
    ],
)
def test_the_tightest_quota_of_all_groups_above_counts(
    tmp_path: Path, own: str, above: str, expected: float | None
) -> None:
    mount = write_group(tmp_path / "cgroup")
    write_group(mount / "a.slice", cpu__max=above)
    write_group(mount / "a.slice" / "b.service", cpu__max=own)
    assert cpu_quota_cores(write_proc(tmp_path / "proc", mount, "/a.slice/b.service")) == expected


def test_a_container_sees_its_own_quota_at_the_mount(tmp_path: Path) -> None:
    mount = write_group(tmp_path / "cgroup", cpu__max="250000 100000")
    assert cpu_quota_cores(write_proc(tmp_path / "proc", mount, "/docker/c0ffee", root="/docker/c0ffee")) == 2.5


@pytest.mark.parametrize(("quota", "expected"), [(300_000, 3.0), (-1, None)])
def test_version_1_has_a_file_for_each_number(tmp_path: Path, quota: int, expected: float | None) -> None:
    mount = write_group(tmp_path / "cpu")
    write_group(mount / "job", cpu__cfs_quota_us=quota, cpu__cfs_period_us=100_000)
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text("4:memory:/job\n3:cpu,cpuacct:/job\n")
    (proc / "mountinfo").write_text(f"30 23 0:27 / {mount} rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n")
    assert cpu_quota_cores(proc) == expected


def test_a_system_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert cpu_quota_cores(tmp_path) is None
