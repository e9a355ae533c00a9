"""A supervisor whose children are idle processes: a test speaks in their place."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from onward.clock import Clock, SystemClock
from onward.config import ServeConfig
from onward.proto.model import ModelConfig, PreparedModel
from onward.supervisor.child_process import ChildProcess
from onward.supervisor.children import Child, ChildState, ProcessRole
from onward.supervisor.oom import OomWatch
from onward.supervisor.pd_config import PdConfig
from onward.supervisor.predecessor import Predecessor
from onward.supervisor.registration_config import resolve_registration
from onward.supervisor.supervisor import Supervisor
from onward.transport.control_channel import ControlChannel, control_pair
from onward.web.auth.api_key_file import ApiKeySource

SHAPE = ModelConfig("llama", 32, 8, 16, 1, 1, 1, 8, 256, 1e-5, 1e4)
PD = PdConfig(cluster_key="ab" * 32, handoff_address="tcp://127.0.0.1:7000")


@contextmanager
def supervisor_of(
    config: ServeConfig,
    *,
    with_handoff: bool = False,
    key_source: ApiKeySource | None = None,
    clock: Clock | None = None,
    oom_watch: OomWatch | None = None,
    pd: PdConfig = PD,
    predecessor: Predecessor | None = None,
) -> Iterator[Supervisor]:
    with socket.socket() as listening, socket.socket() as handoff:
        made = Supervisor(
            config,
            PreparedModel("small", "", SHAPE, "float32", "none", "", [], None, None, None, None, []),
            listening,
            clock or SystemClock(),
            pd=pd,
            routers=resolve_registration(config, 4711),
            handoff=handoff if with_handoff else None,
            on_progress=print,
            on_ready=lambda worker: None,
            key_source=key_source,
            oom_watch=oom_watch,
            predecessor=predecessor,
        )
        try:
            yield made
        finally:
            made._clean_up()


def child_of(supervisor: Supervisor, role: ProcessRole, incarnation: str) -> tuple[Child, ControlChannel]:
    """A ready child, and its end of the channel, for the test to close."""
    channel, theirs = control_pair()
    process = subprocess.Popen(["sleep", "60"])
    index = len(supervisor._core.children_of(role))
    child = supervisor._core.children[incarnation] = Child(role, index, incarnation, 0.0, ChildState.READY)
    supervisor._processes[child] = ChildProcess(process, channel, os.pidfd_open(process.pid))
    supervisor._selector.register(channel.fileno(), 1, child)
    return child, ControlChannel(theirs)


def kill_and_reap(supervisor: Supervisor, child: Child) -> None:
    """As the kernel would kill it."""
    process = supervisor._processes[child].process
    process.kill()
    process.wait()
    supervisor._reap()
