"""CPU time and memory of processes, read from the kernel."""

import os
import subprocess
import sys
from pathlib import Path

from onward.obs.metrics import Registry
from onward.obs.process_usage import ProcessUsage, memory_file_bytes, read_usage, register_own_usage


def values(registry: Registry, name: str) -> dict[str, float]:
    [family] = [one for one in registry.snapshot() if one.name == name]
    return {entry.labels["process"]: entry.value for entry in family.series}


def own_cpu_s() -> float:
    times = os.times()
    return times.user + times.system


def test_our_own_usage_is_what_the_system_says() -> None:
    before_s = own_cpu_s()
    usage = read_usage(os.getpid())
    assert usage is not None
    assert round(before_s, 2) <= round(usage.cpu_s, 2) <= round(own_cpu_s(), 2)
    assert 1 << 20 < usage.resident_bytes < 1 << 40


def test_a_process_that_is_gone_has_no_usage() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert read_usage(child.pid) is None


def test_a_name_with_spaces_and_parentheses_moves_no_field(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = [str(number) for number in range(3, 53)]
    (tmp_path / "7" / "stat").write_text(f"7 (a) b (c) {' '.join(fields)}\n")
    usage = read_usage(7, tmp_path)
    assert usage is not None
    assert usage.cpu_s == (14 + 15) / os.sysconf("SC_CLK_TCK")
    assert usage.resident_bytes == 24 * os.sysconf("SC_PAGE_SIZE")


def test_the_time_of_a_dead_process_stays_in_the_sum_and_its_memory_goes() -> None:
    registry, usage = Registry(), ProcessUsage()
    usage.register(registry)
    usage.sample({"first": ("worker", os.getpid()), "second": ("api", os.getpid())})
    before = values(registry, "onward_process_cpu_seconds_total")
    assert before["worker"] > 0
    usage.sample({"second": ("api", os.getpid())})
    after = values(registry, "onward_process_cpu_seconds_total")
    assert after["worker"] == before["worker"]
    assert set(values(registry, "onward_process_resident_memory_bytes")) == {"api"}
    usage.sample({"third": ("worker", os.getpid()), "second": ("api", os.getpid())})
    assert values(registry, "onward_process_cpu_seconds_total")["worker"] >= 2 * before["worker"]


def test_a_process_can_show_its_own() -> None:
    registry = Registry()
    register_own_usage(registry, "router")
    assert values(registry, "onward_process_cpu_seconds_total")["router"] > 0
    assert values(registry, "onward_process_resident_memory_bytes")["router"] > 1 << 20


def test_a_process_that_does_something_else_leaves_what_it_used_before_where_it_was() -> None:
    """As a standby that becomes the worker: no counter goes back, and nothing counts twice."""
    registry, usage = Registry(), ProcessUsage()
    usage.register(registry)
    usage.sample({"b": ("standby", os.getpid())})
    before = values(registry, "onward_process_cpu_seconds_total")
    while own_cpu_s() < before["standby"] + 0.05:
        sum(range(10_000))
    usage.sample({"b": ("worker", os.getpid())})
    after = values(registry, "onward_process_cpu_seconds_total")
    assert after["standby"] == before["standby"]
    assert 0 < after["worker"] < before["standby"] + 1.0


def test_the_memory_of_a_memory_file_is_counted_once_and_by_its_name() -> None:
    fds = [os.memfd_create("onward-test-file"), os.memfd_create("onward-test-other")]
    for fd in fds:
        os.pwrite(fd, b"x" * (1 << 20), 0)
    fds.append(os.dup(fds[0]))
    assert memory_file_bytes(os.getpid(), "onward-test-file") == 1 << 20
    assert memory_file_bytes(os.getpid(), "onward-test") == 0
    for fd in fds:
        os.close(fd)


def test_a_process_that_is_gone_has_no_memory_files(tmp_path: Path) -> None:
    assert memory_file_bytes(1, "onward-test-file", tmp_path) == 0
