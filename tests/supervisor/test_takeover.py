"""The supervisor of a new server while the old one still serves: what it starts, and when it stops."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from onward.config import ServeConfig
from onward.errors import StartupError
from onward.proto.adoption import ADOPTION_PROTOCOL, AdoptionAborted, AdoptionRequest, FromPredecessor, NowServing
from onward.proto.control import ChildReady, EngineUp, StartListening, UpdateApiKeys
from onward.supervisor import supervisor as supervisor_module
from onward.supervisor.adoption_socket import adoption_address, connect_to
from onward.supervisor.children import Child, ProcessRole
from onward.supervisor.pd_config import PdConfig
from onward.supervisor.predecessor import Predecessor, receive_offers
from onward.supervisor.successor import Offer, SuccessorEvent, SuccessorListener
from onward.supervisor.supervisor import Supervisor
from onward.supervisor.takeover import needs_port_of_predecessor
from onward.web.auth.api_key_file import ApiKeySource
from onward.web.auth.api_key_table import table_text
from tests.supervisor.stand_ins import child_of, supervisor_of
from tests.transport.test_zmq import HELLO
from tests.web import route_access

HOST = "127.0.0.1"


@contextmanager
def old_server() -> Iterator[tuple[SuccessorListener, Predecessor]]:
    """The old server's listener, and the old server as a new one sees it. It keeps no memory."""
    with socket.create_server((HOST, 0)) as listening:
        port = listening.getsockname()[1]
        server = SuccessorListener(HOST, port, lambda: Offer((listening.fileno(),), None))
        server.open()
        peer = connect_to(adoption_address(HOST, port), FromPredecessor)
        assert peer is not None
        peer.channel.send(AdoptionRequest(ADOPTION_PROTOCOL))
        server.poll()
        predecessor = receive_offers(peer)
        with predecessor.listening:
            try:
                yield server, predecessor
            finally:
                server.close()


def run_once(supervisor: Supervisor) -> None:
    reading, writing = socket.socketpair()
    with reading, writing:
        supervisor._run_once(reading)


def make_ready(supervisor: Supervisor) -> None:
    """As if all processes had started. A test speaks for the ones that it needs."""
    supervisor._core.was_ready = True
    supervisor._core.engine_up = EngineUp("engine-1", "", HELLO)


@pytest.mark.parametrize("stage", ["starting", "takeover requested", "memory released"])
def test_a_new_server_that_is_told_to_stop_leaves_the_address_to_the_old_one(stage: str) -> None:
    with old_server() as (server, predecessor), supervisor_of(ServeConfig(), predecessor=predecessor) as supervisor:
        api, channel = child_of(supervisor, ProcessRole.API, "api-1")
        process = supervisor._processes[api].process
        if stage != "starting":
            predecessor.take_over(supervisor._clock.now_s())
            assert server.poll() is SuccessorEvent.TAKE_OVER
        if stage == "memory released":
            assert server.release("")
            make_ready(supervisor)
        supervisor._on_signal(0, None)
        run_once(supervisor)
        assert process.poll() is not None, "none of its processes is left"
        old = server._successor
        assert old is not None
        assert old.channel.receive() == AdoptionAborted(is_memory_suspect=False)
        channel.close()
        predecessor.close()


def crash(supervisor: Supervisor, child: Child) -> None:
    process = supervisor._processes[child].process
    process.send_signal(signal.SIGSEGV)
    process.wait()


@pytest.mark.parametrize("end", ["told to stop", "its engine dies too"])
def test_a_new_server_that_ends_for_another_reason_still_reports_the_crash_of_its_standby(end: str) -> None:
    """The standby had mapped the old server's memory, and its death has not been noticed yet."""
    with old_server() as (server, predecessor):
        with supervisor_of(ServeConfig(), predecessor=predecessor) as supervisor:
            supervisor._adopts_memory = True
            engine, engine_channel = child_of(supervisor, ProcessRole.ENGINE, "engine-1")
            standby, standby_channel = child_of(supervisor, ProcessRole.STANDBY, "worker-1")
            crash(supervisor, standby)
            if end == "told to stop":
                supervisor._on_signal(0, None)
                run_once(supervisor)
            else:
                crash(supervisor, engine)
                with pytest.raises(StartupError):
                    run_once(supervisor)
        old = server._successor
        assert old is not None
        assert old.channel.receive() == AdoptionAborted(is_memory_suspect=True)
        for closing in (engine_channel, standby_channel, predecessor):
            closing.close()


def test_a_stop_signal_that_comes_with_the_last_process_ends_one_server_only() -> None:
    """The old server must not exit: the new one is about to."""
    with old_server() as (server, predecessor), supervisor_of(ServeConfig(), predecessor=predecessor) as supervisor:
        predecessor.take_over(supervisor._clock.now_s())
        assert server.poll() is SuccessorEvent.TAKE_OVER
        assert server.release("")
        run_once(supervisor)
        make_ready(supervisor)
        api, channel = child_of(supervisor, ProcessRole.API, "api-1")
        supervisor._on_signal(0, None)
        supervisor._on_message(api, ChildReady())
        assert channel.receive() is None
        old = server._successor
        assert old is not None
        assert not isinstance(old.channel.receive(), NowServing)
        channel.close()
        predecessor.close()


def test_a_new_server_whose_engine_restarts_during_the_takeover_serves_when_the_engine_is_ready() -> None:
    """Without the old server's memory, its engine was ready once before the takeover."""
    with old_server() as (server, predecessor), supervisor_of(ServeConfig(), predecessor=predecessor) as supervisor:
        predecessor.take_over(supervisor._clock.now_s())
        assert server.poll() is SuccessorEvent.TAKE_OVER
        assert server.release("")
        supervisor._core.was_ready = True
        api, channel = child_of(supervisor, ProcessRole.API, "api-1")
        run_once(supervisor)
        assert not isinstance(channel.receive(), StartListening)
        old = server._successor
        assert old is not None
        assert old.channel.receive() is None
        make_ready(supervisor)
        supervisor._on_message(api, ChildReady())
        messages = [channel.receive() for _ in range(2)]
        assert StartListening() in messages
        assert old.channel.receive() == NowServing()
        channel.close()


def test_an_old_server_that_has_ended_does_not_keep_the_new_one_busy() -> None:
    with old_server() as (server, predecessor), supervisor_of(ServeConfig(), predecessor=predecessor) as supervisor:
        supervisor._selector.register(predecessor, 1, None)
        predecessor.take_over(supervisor._clock.now_s())
        server.poll()
        assert server.release("")
        server.close()
        run_once(supervisor)
        assert supervisor._selector.select(0) == []
        predecessor.close()


def test_a_key_that_was_revoked_while_the_new_server_started_is_refused_by_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    kept, revoked, _ = route_access.entries()
    path.write_text(table_text(kept) + table_text(revoked))
    path.chmod(0o600)
    keys = ApiKeySource((), str(path))
    with (
        old_server() as (server, predecessor),
        supervisor_of(ServeConfig(), key_source=keys, predecessor=predecessor) as supervisor,
    ):
        _, channel = child_of(supervisor, ProcessRole.API, "api-1")
        path.write_text(table_text(kept))
        make_ready(supervisor)
        predecessor.take_over(supervisor._clock.now_s())
        server.poll()
        assert server.release("")
        run_once(supervisor)
        assert [channel.receive(), channel.receive()] == [UpdateApiKeys([kept]), StartListening()]
        channel.close()


def test_a_standby_that_a_new_server_can_do_without_is_not_started_without_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has adopted no memory, so it has a worker. Meanwhile the old server has its own memory."""
    monkeypatch.setattr(supervisor_module, "free_memory_bytes", lambda: 0)
    with old_server() as (_, predecessor), supervisor_of(ServeConfig(), predecessor=predecessor) as supervisor:
        supervisor._kv_memory.fds_of(supervisor._core.kv_memory)
        supervisor._start(ProcessRole.STANDBY, 0)
        assert not supervisor._processes
        predecessor.close()


def test_an_old_server_that_was_told_to_stop_does_not_start_again_when_the_new_one_fails() -> None:
    with supervisor_of(ServeConfig()) as supervisor:
        now_s = supervisor._clock.now_s()
        supervisor._core.stop_for_successor(now_s)
        supervisor._on_signal(0, None)
        while not supervisor._core.is_stopped:
            supervisor._core.stop(now_s)
        supervisor._hand_over()
        assert supervisor._core.is_stopped
        assert not supervisor._processes


def test_an_engine_accepts_decode_instances_when_the_old_one_has_ended() -> None:
    with old_server() as (server, predecessor), supervisor_of(ServeConfig(), predecessor=predecessor) as supervisor:
        _, channel = child_of(supervisor, ProcessRole.ENGINE, "engine-1")
        run_once(supervisor)
        assert not isinstance(channel.receive(), StartListening)
        predecessor.take_over(supervisor._clock.now_s())
        server.poll()
        assert server.release("")
        run_once(supervisor)
        messages = [channel.receive() for _ in range(2)]
        assert StartListening() in messages
        channel.close()
        predecessor.close()


def test_a_worker_whose_port_is_the_old_ones_starts_as_a_standby() -> None:
    """It opens the port when it is activated, after the old server has ended."""
    config = ServeConfig(role="decode", kv_port=7001)
    pd = PdConfig(kv_backend="tcp", cluster_key="ab" * 32)
    with old_server() as (_, predecessor):
        assert needs_port_of_predecessor(predecessor, config, pd)
        assert not needs_port_of_predecessor(predecessor, replace(config, kv_port=0), pd)
        assert not needs_port_of_predecessor(predecessor, config, replace(pd, kv_backend="shm"))
        assert not needs_port_of_predecessor(None, config, pd)
        with supervisor_of(config, pd=pd, predecessor=predecessor) as supervisor:
            assert supervisor._core.awaits_release
        predecessor.close()
