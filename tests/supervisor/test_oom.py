"""A process that the kernel killed for memory is told apart from one that a signal killed."""

import logging
from contextlib import closing
from pathlib import Path

import pytest

from onward.config import ServeConfig
from onward.errors import StartupError
from onward.supervisor.children import ProcessRole
from onward.supervisor.core import KillProcess
from onward.supervisor.oom import WINDOW_S, OomCounts, OomEvidence, OomWatch, read_counts
from onward.supervisor.supervisor import Supervisor
from tests.obs.control_groups import write_group, write_proc
from tests.supervisor.stand_ins import child_of, kill_and_reap, supervisor_of


class Kernel:
    """Its counters, as files."""

    def __init__(self, folder: Path, version: int = 2) -> None:
        self.file = "memory.events" if version == 2 else "memory.oom_control"
        self.mount = write_group(folder / "cgroup")
        self.vmstat = folder / "vmstat"
        self.proc = write_proc(folder / "proc", self.mount, "/", version=version)

    def count(self, *, own: int | None = None, machine: int | None = None) -> None:
        if own is not None:
            (self.mount / self.file).write_text(f"low 0\noom_kill_disable 0\noom {own}\noom_kill {own}\n")
        if machine is not None:
            self.vmstat.write_text(f"nr_free_pages 5\noom_kill {machine}\nnuma_hit 3\n")

    def read(self) -> OomCounts:
        return read_counts(self.proc, self.vmstat)


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_that_the_own_group_counted_is_certain_and_explains_one_death(tmp_path: Path, version: int) -> None:
    kernel = Kernel(tmp_path, version)
    kernel.count(own=3, machine=7)
    watch = OomWatch(kernel.read)
    watch.sample(0.0)
    assert watch.explain_kill() is None
    kernel.count(own=4, machine=8)
    watch.sample(1.0)  # the process takes a while to be gone
    assert watch.explain_kill() is OomEvidence.CERTAIN
    assert watch.explain_kill() is None
    kernel.count(own=6)
    assert [watch.explain_kill() for _ in range(3)] == [OomEvidence.CERTAIN, OomEvidence.CERTAIN, None]


def test_a_kill_elsewhere_on_the_machine_explains_nothing_where_the_own_group_is_counted(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    kernel.count(own=0, machine=7)
    watch = OomWatch(kernel.read)
    watch.sample(0.0)
    kernel.count(machine=8)
    assert watch.explain_kill() is None


def test_a_kill_that_only_the_machine_counted_is_likely(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    kernel.count(machine=7)
    watch = OomWatch(kernel.read)
    watch.sample(0.0)
    assert watch.explain_kill() is None
    kernel.count(machine=8)
    assert watch.explain_kill() is OomEvidence.LIKELY


def test_where_nothing_is_counted_a_kill_by_nobody_we_know_is_likely(tmp_path: Path) -> None:
    watch = OomWatch(Kernel(tmp_path).read)
    watch.sample(0.0)
    assert watch.explain_kill() is OomEvidence.LIKELY


def test_a_kill_of_long_ago_explains_no_death_of_now(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    kernel.count(own=0)
    watch = OomWatch(kernel.read)
    watch.sample(0.0)
    kernel.count(own=1)
    watch.sample(1.0)
    watch.sample(1.0 + WINDOW_S)
    assert watch.explain_kill() is None


def killed(supervisor: Supervisor, role: ProcessRole) -> None:
    child, theirs = child_of(supervisor, role, f"{role.value}-1")
    with closing(theirs):
        kill_and_reap(supervisor, child)


def test_log_metric_and_view_say_which_process_was_killed_for_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = Kernel(tmp_path)
    kernel.count(own=0)
    with supervisor_of(ServeConfig(), oom_watch=OomWatch(kernel.read)) as supervisor:
        supervisor._core.was_ready = True
        supervisor._oom_watch.sample(0.0)
        with caplog.at_level(logging.WARNING):
            killed(supervisor, ProcessRole.API)
            kernel.count(own=1)
            killed(supervisor, ProcessRole.WORKER)
        view = supervisor._instance_view(1)
    by_hand, for_memory = [text for text in caplog.messages if text.startswith("died")]
    assert "role=api" in by_hand and "memory" not in by_hand
    assert "role=worker" in for_memory and OomEvidence.CERTAIN.value in for_memory
    assert {role: count for role, count in view.oom_kills.items() if count} == {"worker": 1}
    [family] = [family for family in view.families if family.name == "onward_oom_kills_total"]
    kills = [(one.labels, one.value) for one in family.series if one.value]
    assert kills == [({"process": "worker", "evidence": "certain"}, 1)]


def test_a_process_that_the_supervisor_killed_is_not_taken_for_one_of_the_kernel_s(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    with supervisor_of(ServeConfig(), oom_watch=OomWatch(kernel.read)) as supervisor:
        supervisor._core.was_ready = True
        child, theirs = child_of(supervisor, ProcessRole.WORKER, "worker-1")
        with closing(theirs):
            supervisor._execute([KillProcess(child, "silence")])
            supervisor._processes[child].process.wait()
            supervisor._reap()
        assert not any(supervisor._instance_view(1).oom_kills.values())


def test_a_worker_that_is_killed_for_memory_while_it_starts_is_said_to_be(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    kernel.count(own=0)
    with supervisor_of(ServeConfig(), oom_watch=OomWatch(kernel.read)) as supervisor:
        supervisor._oom_watch.sample(0.0)
        kernel.count(own=1)
        with pytest.raises(StartupError, match=r"lack of memory\); try a smaller --num-kv-blocks"):
            killed(supervisor, ProcessRole.WORKER)
