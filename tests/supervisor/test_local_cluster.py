"""A cluster's processes, with small scripts in the place of instances: started, read, restarted, ended."""

import errno
import logging
import os
import select
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onward.clock import SystemClock
from onward.errors import StartupError
from onward.supervisor.cluster_member import ClusterMember, MemberSpec
from onward.supervisor.local_cluster import KILL_AFTER_S, LocalCluster

READY = "print('  Onward serves', flush=True)"
WAIT = "import signal; signal.pause()"


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before:
        signal.signal(number, handler)


def instance(name: str, script: str) -> MemberSpec:
    return MemberSpec(name, name.split("-")[0], (sys.executable, "-c", script), "http://127.0.0.1:1", None, 1)


def cluster_of(
    *plans: MemberSpec,
    on_line: Callable[[str, str], None] = lambda name, line: None,
    on_ready: Callable[[LocalCluster], None],
    drain_s: float = 0.0,
    control_port: int | None = None,
) -> LocalCluster:
    return LocalCluster(
        plans,
        SystemClock(),
        inherit_fds=(),
        ready_prefix="  Onward ",
        drain_s=drain_s,
        on_line=on_line,
        on_ready=on_ready,
        control_port=control_port,
    )


def stop(_: LocalCluster) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_it_is_ready_when_all_are_and_a_signal_ends_all() -> None:
    pids: list[int] = []

    def ready(cluster: LocalCluster) -> None:
        pids.extend(i.process.pid for i in cluster.members if i.process is not None)
        stop(cluster)

    plans = [instance("prefill-0", f"{READY}; {WAIT}"), instance("decode-0", f"{READY}; {WAIT}")]
    cluster_of(*plans, on_ready=ready).run()
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_lines_of_the_log_name_their_instance_and_the_welcome_is_swallowed() -> None:
    lines: list[tuple[str, str]] = []
    script = f"import sys; sys.stderr.write('one\\n\\ntwo'); sys.stderr.flush(); {READY}; {WAIT}"
    cluster_of(instance("mixed-0", script), on_line=lambda *said: lines.append(said), on_ready=stop).run()
    assert lines == [("mixed-0", "one"), ("mixed-0", "two")]


def test_a_process_has_its_secrets_in_its_environment(tmp_path: Path) -> None:
    script = f"import os; open({str(tmp_path / 'seen')!r}, 'w').write(os.environ['ONWARD_API_KEY']); {READY}; {WAIT}"
    plan = replace(instance("router", script), environment={"ONWARD_API_KEY": "k"})
    cluster_of(plan, on_ready=stop).run()
    assert (tmp_path / "seen").read_text() == "k"


def test_a_hangup_is_for_those_who_have_a_file_of_keys_once_they_are_ready() -> None:
    say = "lambda *_: print('again', file=sys.stderr, flush=True)"
    reading = f"signal.signal(signal.SIGHUP, {say}); {READY}\nwhile True: signal.pause()"
    early = "import os; os.kill(os.getppid(), signal.SIGHUP)"
    plans = [
        replace(instance("router", f"import signal, sys; {early}; {reading}"), reloads_on_sighup=True),
        instance("decode-0", f"{READY}; {WAIT}"),
    ]
    lines: list[tuple[str, str]] = []
    all_ready: list[LocalCluster] = []

    def stop_when_both_were_seen() -> None:
        if all_ready and len(lines) == 3:
            stop(cluster)

    def on_line(name: str, line: str) -> None:
        lines.append((name, line))
        if len(lines) < 3:
            os.kill(os.getpid(), signal.SIGHUP)
        stop_when_both_were_seen()

    def on_ready(made: LocalCluster) -> None:
        all_ready.append(made)
        stop_when_both_were_seen()

    cluster = cluster_of(*plans, on_line=on_line, on_ready=on_ready)
    cluster.run()
    assert lines == [("router", "again")] * 3
    assert cluster.members[1].num_times_ready == 1, "it would have died of it"


def test_an_instance_that_never_gets_ready_ends_the_cluster_with_its_own_words() -> None:
    failing = instance("decode-0", "import sys; sys.exit('onward serve: no such model')")
    with pytest.raises(StartupError, match=r"^decode-0 cannot start: no such model$"):
        cluster_of(instance("prefill-0", WAIT), failing, on_ready=stop).run()


def test_an_instance_that_dies_is_started_again_by_the_same_command() -> None:
    plan = instance("decode-0", f"import sys; print('up', file=sys.stderr, flush=True); {READY}; {WAIT}")
    lines: list[str] = []

    def on_line(_name: str, line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            stop(cluster)

    def kill(made: LocalCluster) -> None:
        process = made.members[0].process
        assert process is not None
        process.kill()

    cluster = cluster_of(plan, on_line=on_line, on_ready=kill)
    cluster.run()
    assert lines == ["up", "up"]


def test_a_restart_that_the_system_refuses_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program, moved = tmp_path / "instance", tmp_path / "moved"
    program.write_text(f"#!{sys.executable}\nimport sys\nprint('up', file=sys.stderr, flush=True); {READY}; {WAIT}\n")
    program.chmod(0o700)
    lines: list[str] = []

    class RestoreProgram(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("cannot start instance=mixed-0"):
                moved.rename(program)

    def on_line(_name: str, line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            stop(cluster)

    def on_ready(made: LocalCluster) -> None:
        program.rename(moved)
        process = made.members[0].process
        assert process is not None
        process.kill()

    spec = replace(instance("mixed-0", ""), command=(str(program),))
    cluster = cluster_of(spec, on_line=on_line, on_ready=on_ready)
    handler = RestoreProgram()
    logging.getLogger("onward.supervisor.local_cluster").addHandler(handler)
    try:
        cluster.run()
    finally:
        logging.getLogger("onward.supervisor.local_cluster").removeHandler(handler)
    assert lines == ["up", "up"]


class FullSelector(selectors.DefaultSelector):
    """A selector for which the operating system watches no more files."""

    def __init__(self, member: ClusterMember) -> None:
        super().__init__()
        self._member = member
        self.processes: list[subprocess.Popen[bytes] | None] = []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self.processes.append(self._member.process)
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_process_whose_output_cannot_be_read_does_not_run_beside_the_next_one() -> None:
    cluster = cluster_of(instance("mixed-0", WAIT), on_ready=stop)
    [member] = cluster.members
    cluster._selector.close()
    with FullSelector(member) as selector:
        cluster._selector = selector
        cluster._restart(member, 100.0)
        [process] = selector.processes
        assert process is not None and process.returncode == -signal.SIGKILL
        assert member.process is None
        assert member.restart_at_s == 101.0


def test_a_second_signal_does_not_wait_for_an_instance_that_will_not_leave() -> None:
    say_no = "lambda *_: print('no', file=sys.stderr, flush=True)"
    stubborn = f"import signal, sys; signal.signal(signal.SIGTERM, {say_no}); {READY}\nwhile True: signal.pause()"
    cluster = cluster_of(
        instance("decode-0", stubborn), on_line=lambda *_: stop(cluster), on_ready=stop, drain_s=1000.0
    )
    cluster.run()
    assert cluster.members[0].process is not None
    assert cluster.members[0].process.returncode == -signal.SIGKILL


def test_the_router_leaves_first_and_prefill_instances_last() -> None:
    """Each says so when it is asked to leave, and takes its time: no instance is asked before the others are gone."""
    lines: list[str] = []
    leave = "lambda *_: (print('asked', file=sys.stderr, flush=True), time.sleep(0.2), sys.exit('left'))"
    script = f"import signal, sys, time; signal.signal(signal.SIGTERM, {leave}); {READY}; {WAIT}"
    names = ("prefill-0", "decode-0", "router")
    cluster_of(
        *(instance(name, script) for name in names),
        on_line=lambda name, line: lines.append(f"{name} {line}"),
        on_ready=stop,
        drain_s=20.0,
    ).run()
    assert lines == [f"{name} {did}" for name in reversed(names) for did in ("asked", "left")]


def test_one_that_will_not_leave_is_ended_before_the_others_are_asked() -> None:
    lines: list[tuple[str, int | None]] = []
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}\nwhile True: signal.pause()"
    leave = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit('left')); {READY}; {WAIT}"

    def on_line(_: str, line: str) -> None:
        router = cluster.members[0].process
        assert router is not None
        lines.append((line, router.poll()))

    cluster = cluster_of(
        *(instance("router", stubborn), instance("mixed-0", leave)),
        on_line=on_line,
        on_ready=stop,
        drain_s=0.2 - KILL_AFTER_S,
    )
    cluster.run()
    assert lines == [("left", -signal.SIGKILL)]


def test_instances_do_not_outlive_a_cluster_that_is_killed() -> None:
    code = (
        "from tests.supervisor.test_local_cluster import *\n"
        f"plan = instance('mixed-0', {f'{READY}; {WAIT}'!r})\n"
        "cluster_of(plan, on_ready=lambda c: print(c.members[0].process.pid, flush=True)).run()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stdout is not None
        pidfd = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
    try:
        assert _ended(pidfd), "the instance is still there"
    finally:
        os.close(pidfd)


def _ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 20)[0])
