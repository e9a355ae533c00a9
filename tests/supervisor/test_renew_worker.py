"""The engine may ask for a new worker; what follows is the way of any dead worker."""

import os
import socket
import subprocess
from collections.abc import Iterator
from typing import cast

import pytest

from onward.clock import SystemClock
from onward.config import ServeConfig
from onward.proto.control import RenewWorker
from onward.proto.model import PreparedModel
from onward.supervisor.children import Child, Role
from onward.supervisor.pd import PdPlan
from onward.supervisor.supervisor import Supervisor
from onward.transport.control import control_pair


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    with socket.socket() as listening:
        made = Supervisor(
            ServeConfig(),
            cast(PreparedModel, None),
            listening,
            SystemClock(),
            pd=PdPlan(),
            handoff=None,
            on_progress=print,
            on_ready=lambda: None,
        )
        yield made
        made._clean_up()


def child_of(supervisor: Supervisor, role: Role, incarnation: str) -> Child:
    channel, theirs = control_pair()
    with theirs:
        process = subprocess.Popen(["sleep", "60"])
    child = Child(role, 0, incarnation, process, channel, os.pidfd_open(process.pid), 0.0)
    supervisor._children.add(child)
    return child


def test_a_worker_is_ended_at_its_engines_word_and_another_one_is_not(supervisor: Supervisor) -> None:
    engine = child_of(supervisor, Role.ENGINE, "engine-1")
    worker = child_of(supervisor, Role.WORKER, "worker-2")
    supervisor._on_message(engine, RenewWorker("worker-1", "said too late"))
    assert worker.process.poll() is None
    supervisor._on_message(engine, RenewWorker("worker-2", "too much is quarantined"))
    assert worker.cause_of_death() == "signal 9 (SIGKILL)"
    assert engine.process.poll() is None
