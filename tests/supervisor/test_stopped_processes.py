"""Processes that a signal has stopped are replaced within seconds, and no other process ever is for that reason."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from onward.config import ServeConfig
from onward.obs.process_usage import ProcessUsage, read_usage
from onward.supervisor.children import ProcessRole
from onward.supervisor.stopped_processes import MAX_SAMPLE_GAP_S, StoppedProcesses
from tests.supervisor.instance_of_core import InstanceOfCore
from tests.supervisor.stand_ins import child_of, supervisor_of

TIMEOUT_S = 5.0


def overdue_at(watch: StoppedProcesses, samples: list[set[str]]) -> list[list[str]]:
    """One sample each second, and who is overdue then."""
    overdue = []
    for second, stopped in enumerate(samples):
        watch.record(stopped, float(second))
        overdue.append(watch.overdue(float(second)))
    return overdue


def test_a_process_that_stays_stopped_is_overdue_after_the_timeout() -> None:
    assert overdue_at(StoppedProcesses(TIMEOUT_S), [set(), *[{"worker"}] * 6]) == [[]] * 6 + [["worker"]]


def test_a_process_that_continues_in_between_begins_anew() -> None:
    samples = [{"worker"}, {"worker"}, set(), *[{"worker"}] * 5]
    assert overdue_at(StoppedProcesses(TIMEOUT_S), samples) == [[]] * 8


def test_what_was_seen_before_the_supervisor_was_suspended_does_not_count() -> None:
    watch = StoppedProcesses(TIMEOUT_S)
    watch.record({"worker"}, 0.0)
    resumed_s = MAX_SAMPLE_GAP_S + 100.0
    watch.record({"worker"}, resumed_s)
    assert watch.overdue(resumed_s) == []
    assert watch.overdue(resumed_s + TIMEOUT_S) == ["worker"]


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    child = subprocess.Popen([sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"], stdout=-1)
    assert child.stdout is not None
    with child.stdout:
        child.stdout.readline()
        yield child
        child.kill()
        child.wait()


def test_the_kernel_says_which_process_is_stopped(child: "subprocess.Popen[bytes]") -> None:
    usage = ProcessUsage()
    usage.sample({"child": ("worker", child.pid), "own": ("supervisor", os.getpid())})
    assert usage.stopped() == set()
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    usage.sample({"child": ("worker", child.pid), "own": ("supervisor", os.getpid())})
    assert usage.stopped() == {"child"}
    sample = read_usage(child.pid)
    assert sample is not None and sample.is_stopped
    child.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("role", [ProcessRole.ENGINE, ProcessRole.WORKER, ProcessRole.API, ProcessRole.STREAM_STORE])
def test_a_supervisor_kills_a_process_that_stays_stopped(role: ProcessRole) -> None:
    with ExitStack() as channels, supervisor_of(ServeConfig(stopped_timeout_s=TIMEOUT_S)) as supervisor:
        victim, channel = child_of(supervisor, role, "victim")
        other, other_channel = child_of(supervisor, ProcessRole.API, "other")
        channels.callback(channel.close)
        channels.callback(other_channel.close)
        process = supervisor._processes[victim].process
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        for second in range(int(TIMEOUT_S) + 1):
            assert process.poll() is None
            supervisor._sample_usage()
            supervisor._replace_stopped(float(second))
        assert supervisor._processes[victim].killed_by_supervisor
        assert process.wait() == -signal.SIGKILL
        assert supervisor._processes[other].process.poll() is None


def test_a_stopped_process_is_left_to_the_bounds_of_a_shutdown() -> None:
    instance = InstanceOfCore()
    instance.make_ready()
    instance.stop()
    instance.take()
    instance.replace_stopped(instance.child(ProcessRole.WORKER))
    assert instance.take_killed() == []
