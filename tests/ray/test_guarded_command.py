"""A command that ends with its Ray node, with stand-ins for the raylet."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from onward.ray.node_guard import NODE_LOST

WAIT_S = 30.0
WAIT = "import signal; signal.pause()"
COMMAND = f"import os; print(os.getpid(), flush=True); {WAIT}"


@pytest.fixture
def raylet(tmp_path: Path) -> "Iterator[subprocess.Popen[bytes]]":
    program = tmp_path / "raylet"
    program.symlink_to(sys.executable)
    with subprocess.Popen([str(program), "-c", f"print(flush=True); {WAIT}"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@contextmanager
def guard(raylet_pid: int, script: str = COMMAND, actor_pid: int | None = None) -> "Iterator[subprocess.Popen[str]]":
    own_pid = os.getpid() if actor_pid is None else actor_pid
    command = [sys.executable, "-m", "onward.ray.guarded_command", str(raylet_pid), str(own_pid)]
    with subprocess.Popen([*command, sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()  # the command ends with it


def pidfd_of_command(process: "subprocess.Popen[str]") -> int:
    assert process.stdout is not None
    return os.pidfd_open(int(process.stdout.readline()))


def has_ended(pidfd: int) -> bool:
    try:
        return bool(select.select([pidfd], [], [], WAIT_S)[0])
    finally:
        os.close(pidfd)


def test_a_command_ends_when_the_raylet_alone_has_died(raylet: "subprocess.Popen[bytes]") -> None:
    with guard(raylet.pid) as process:
        command = pidfd_of_command(process)
        raylet.kill()
        assert has_ended(command)
        assert process.wait(WAIT_S) == NODE_LOST


def test_a_command_ends_when_its_actor_has_died(raylet: "subprocess.Popen[bytes]") -> None:
    code = (
        "import os, subprocess, sys, signal\n"
        f"guard = [sys.executable, '-m', 'onward.ray.guarded_command', '{raylet.pid}', str(os.getpid())]\n"
        f"subprocess.Popen([*guard, sys.executable, '-c', {COMMAND!r}]); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as actor:
        command = pidfd_of_command(actor)
        actor.kill()
        assert has_ended(command)


def test_a_command_ends_when_its_guard_is_killed(raylet: "subprocess.Popen[bytes]") -> None:
    with guard(raylet.pid) as process:
        command = pidfd_of_command(process)
        process.kill()
        assert has_ended(command)


@pytest.mark.parametrize(
    ("script", "status"), [("", 0), ("import sys; sys.exit(3)", 3), ("import os; os.abort()", 134)]
)
def test_the_end_of_a_command_is_passed_on(raylet: "subprocess.Popen[bytes]", script: str, status: int) -> None:
    with guard(raylet.pid, script) as process:
        assert process.wait(WAIT_S) == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_stop_or_reload_is_passed_on_as_often_as_it_comes(
    raylet: "subprocess.Popen[bytes]", number: signal.Signals
) -> None:
    say = "lambda *_: print('asked', flush=True)"
    script = f"import signal; signal.signal({number}, {say}); print('up', flush=True)\nwhile True: signal.pause()"
    with guard(raylet.pid, script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        for _ in range(2):
            process.send_signal(number)
            assert process.stdout.readline() == "asked\n"
        raylet.kill()


def test_no_command_runs_where_the_raylet_or_the_actor_has_gone(raylet: "subprocess.Popen[bytes]") -> None:
    for raylet_pid, actor_pid in ((os.getpid(), None), (raylet.pid, raylet.pid)):
        with guard(raylet_pid, "print('ran')", actor_pid) as process:
            assert process.stdout is not None
            assert (process.wait(WAIT_S), process.stdout.read()) == (NODE_LOST, "")
