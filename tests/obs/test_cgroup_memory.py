"""Which control groups limit a process, and what they leave it."""

from pathlib import Path

import pytest

from onward.obs.cgroup_memory import memory_cgroups
from tests.obs.control_groups import MIB, write_group, write_proc


def left(proc: Path) -> list[int | None]:
    return [group.headroom_bytes() for chain in memory_cgroups(proc) for group in chain]


def test_a_nested_group_of_version_2_is_under_the_limits_of_all_above_it(tmp_path: Path) -> None:
    mount = write_group(tmp_path / "cgroup")
    write_group(mount / "a.slice", memory__max=900 * MIB, memory__high=300 * MIB, memory__current=100 * MIB)
    write_group(mount / "a.slice" / "b.service", memory__max="max", memory__high="max", memory__current=40 * MIB)
    proc = write_proc(tmp_path / "proc", mount, "/a.slice/b.service")
    assert left(proc) == [None, 200 * MIB, None]


def test_the_lower_one_of_max_and_high_counts(tmp_path: Path) -> None:
    mount = write_group(tmp_path / "cgroup", memory__max=50 * MIB, memory__high=80 * MIB, memory__current=20 * MIB)
    assert left(write_proc(tmp_path / "proc", mount, "/")) == [30 * MIB]


def test_files_that_were_read_do_not_count_as_used(tmp_path: Path) -> None:
    stat = f"anon {9 * MIB}\nshmem {10 * MIB}\ninactive_file {50 * MIB}\nactive_file {30 * MIB}"
    mount = write_group(tmp_path / "cgroup", memory__max=100 * MIB, memory__current=99 * MIB, memory__stat=stat)
    assert left(write_proc(tmp_path / "proc", mount, "/")) == [(100 - (99 - 50 - 30)) * MIB]


def test_version_1_has_its_own_files_and_a_hierarchical_limit(tmp_path: Path) -> None:
    mount = write_group(tmp_path / "memory", memory__use_hierarchy=1, memory__limit_in_bytes=9223372036854771712)
    stat = f"hierarchical_memory_limit {70 * MIB}\ntotal_inactive_file {5 * MIB}\ninactive_file {1 * MIB}"
    files = {"memory__usage_in_bytes": 20 * MIB, "memory__stat": stat, "memory__use_hierarchy": 1}
    write_group(mount / "job", memory__limit_in_bytes=90 * MIB, **files)
    assert left(write_proc(tmp_path / "proc", mount, "/job", version=1)) == [55 * MIB, None]


@pytest.mark.parametrize(("hierarchical", "expected"), [(1, [60 * MIB, 10 * MIB]), (0, [60 * MIB])])
def test_a_parent_of_version_1_limits_its_children_only_if_it_is_hierarchical(
    tmp_path: Path, hierarchical: int, expected: list[int]
) -> None:
    mount = tmp_path / "memory"
    files = {"memory__use_hierarchy": hierarchical, "memory__usage_in_bytes": 40 * MIB}
    write_group(mount, memory__limit_in_bytes=50 * MIB, **files)
    write_group(mount / "job", memory__limit_in_bytes=100 * MIB, **files)
    assert left(write_proc(tmp_path / "proc", mount, "/job", version=1)) == expected


def test_a_container_sees_its_own_part_of_the_hierarchy_at_the_mount(tmp_path: Path) -> None:
    mount = write_group(tmp_path / "cgroup", memory__max=50 * MIB, memory__current=20 * MIB)
    proc = write_proc(tmp_path / "proc", mount, "/docker/c0ffee", root="/docker/c0ffee")
    assert left(proc) == [30 * MIB]


@pytest.mark.parametrize("path", ["/../other", "/of/another/namespace"])
def test_a_path_of_another_namespace_falls_back_to_the_mount(tmp_path: Path, path: str) -> None:
    mount = write_group(tmp_path / "cgroup", memory__max=50 * MIB, memory__current=20 * MIB)
    write_group(tmp_path / "other", memory__max=1, memory__current=1)
    assert left(write_proc(tmp_path / "proc", mount, path)) == [30 * MIB]


def test_a_system_with_both_versions_has_the_limits_of_both(tmp_path: Path) -> None:
    first = write_group(tmp_path / "memory", memory__limit_in_bytes=50 * MIB, memory__usage_in_bytes=20 * MIB)
    second = write_group(tmp_path / "unified")
    proc = write_proc(tmp_path / "proc", first, "/", version=1)
    write_proc(proc, second, "/")
    assert left(proc) == [30 * MIB, None]


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert memory_cgroups(tmp_path) == []
    assert left(write_proc(tmp_path / "proc", tmp_path / "nowhere", "/")) == [None]
