"""The worker process: receives step plans from the engine, runs them and sends the results. The supervisor starts it.

It makes no scheduling decisions and never drops a step: a fault that does not belong to one request ends the process.
"""

import argparse
import contextlib
import gc
import logging
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from onward import log
from onward.errors import OnwardError, StartupError
from onward.models.sharding.rank_lost import RankLost
from onward.proto.control import ActivateWorker, ChildReady, StartFailed, StartupProgress, StartWorker, StopChild
from onward.proto.worker_wire_address import ShmWireAddress
from onward.transport.control_channel import ChannelClosed, ControlChannel, join_supervisor
from onward.transport.shm_wire import WorkerWireBroken, WorkerWireClosed
from onward.transport.worker_wire import open_worker_wire_end
from onward.transport.zmq_sockets import SocketPoller
from onward.worker.kept_memory import KeptMemory
from onward.worker.model_runner import ModelRunner
from onward.worker.runner_factory import open_runner

if TYPE_CHECKING:
    from onward.pd.transfer.kv_transfer_thread import KvTransferThread

_THREAD_SWITCH_INTERVAL_S = 0.0005
_POLL_INTERVAL_S = 0.00002
"""Pause between two checks for a finished step and for new plans: a device does not signal the end of a step. In
practice the system sleeps for about 0.1 ms."""

logger = logging.getLogger(__name__)


def freeze_heap() -> None:
    """Excludes all objects that exist now from garbage collection: scanning all of torch's objects again and again
    costs more than handling a step's plan."""
    gc.collect()
    gc.freeze()


def _wait_for_activation(start: StartWorker, channel: ControlChannel) -> StartWorker:
    """Waits, as a standby worker, for `ActivateWorker`. Returns `start` with the engine's incarnation and the addresses
    of its wires. Any other message ends the process."""
    channel.send(ChildReady())
    message = channel.wait_receive()
    if not isinstance(message, ActivateWorker):
        raise SystemExit(0)
    wire = message.wire
    if isinstance(wire, ShmWireAddress):
        memory_fd, doorbell_fd = channel.take_fds()
        wire = msgspec.structs.replace(wire, memory_fd=memory_fd, doorbell_fd=doorbell_fd)
    return msgspec.structs.replace(
        start, engine_incarnation=message.engine_incarnation, wire=wire, kv_address=message.kv_address
    )


class WorkerProcess:
    def __init__(self, start: StartWorker, channel: ControlChannel) -> None:
        self._channel = channel
        self._report_progress("loading the model")
        self._kv_transfer: KvTransferThread | None = None
        self._poller = SocketPoller()
        if start.kv_address and start.config.device == "cuda":
            raise StartupError("a worker with --device cuda cannot exchange KV with others")
        kept = self._kept_memory(start) if start.kv_memory else None
        self._runner = open_runner(start.model, start.config, self._report_progress, kept, start.rank_fds)
        freeze_heap()
        if start.wire is None:
            start = _wait_for_activation(start, channel)
        assert start.wire is not None, "a worker has a wire to its engine"
        self._kv_transfer = _start_kv_transfer(start, self._runner) if start.kv_address else None
        endpoint = None if self._kv_transfer is None else self._kv_transfer.endpoint
        kv_memory = "" if kept is None else kept.reported_name
        hello = self._runner.hello(start.incarnation, start.engine_incarnation, endpoint, kv_memory)
        self._poller.watch_fd(channel.fileno())
        self._wire = open_worker_wire_end(self._poller, start.wire)
        self._wire.send(hello)

    def run(self) -> None:
        """Begins each plan when it arrives and sends each result when it is ready. Blocks only while no step is in
        flight."""
        while True:
            if not self._runner.is_busy:
                self._poller.wait()
            if isinstance(self._channel.receive(), StopChild):
                return
            while (plan := self._wire.receive()) is not None:
                self._runner.begin(plan)
            if self._runner.has_result and (result := self._runner.finish()) is not None:
                self._wire.send(result)
            elif self._runner.is_busy:
                time.sleep(_POLL_INTERVAL_S)

    def close(self) -> None:
        if self._kv_transfer is not None:
            self._kv_transfer.close()
        self._poller.close()

    def _kept_memory(self, start: StartWorker) -> KeptMemory:
        return KeptMemory(
            start.kv_memory,
            start.kv_memory_fd,
            start.kv_memory_bytes,
            start.weights,
            hand_over=lambda message, fd: self._channel.send(message, (fd,)),
        )

    def _report_progress(self, message: str, fraction: float | None = None) -> None:
        self._channel.send(StartupProgress(message, fraction))


def _start_kv_transfer(start: StartWorker, runner: ModelRunner) -> "KvTransferThread":
    from onward.pd.transfer.kv_transfer_thread import KvMemoryRegion, KvTransferThread

    memory = runner.device.kv_memory
    assert memory is not None, "a worker that exchanges KV has memory that peers can write"
    pool, token_fd = memory.pool, start.writer_token_fd
    kv_transfer = KvTransferThread(
        KvMemoryRegion(pool.data, pool.fd, pool.geometry, memory.layout, None if token_fd < 0 else token_fd),
        backend=start.config.kv_backend,
        host=start.config.kv_host,
        port=start.config.kv_port,
        incarnation=start.incarnation,
        cluster_key=start.cluster_key,
        layers_done=memory.layers_done,
    )
    runner.kv_pusher = kv_transfer
    # With Python's default interval, 5 ms, the transfer thread could delay a step by several intervals when it hashes
    # blocks.
    sys.setswitchinterval(_THREAD_SWITCH_INTERVAL_S)
    poller = SocketPoller()  # its thread's own: sockets are not shared between threads
    kv_transfer.start(poller, poller.worker_kv_wire_end(start.kv_address))
    return kv_transfer


def main() -> None:
    parser = argparse.ArgumentParser(prog="onward.worker.main")
    parser.add_argument("--control-fd", type=int, required=True)
    channel = join_supervisor(parser.parse_args().control_fd)
    start = channel.wait_receive()
    assert isinstance(start, StartWorker), "the first message is StartWorker"
    log.configure("worker", start.config.log_level, start.config.log_format)
    try:
        process = WorkerProcess(start, channel)
    except OnwardError as error:
        channel.send(StartFailed(error.message))
        return
    except MemoryError as error:
        channel.send(StartFailed(f"out of memory while loading the model ({error}); try a smaller --num-kv-blocks"))
        return
    except WorkerWireClosed as closed:
        _await_end(channel, "engine is gone", closed)
        return
    except RankLost as lost:
        _await_end(channel, "another rank is gone", lost)
        return
    try:
        process.run()
    except ChannelClosed:
        logger.warning("the supervisor is gone")
    except WorkerWireClosed as closed:
        _await_end(channel, "engine is gone", closed)
    except RankLost as lost:
        _await_end(channel, "another rank is gone", lost)
    except WorkerWireBroken as broken:
        logger.error(log.event("leaving", because=str(broken)))
    finally:
        process.close()


def _await_end(channel: ControlChannel, what: str, because: Exception) -> None:
    """Waits until the supervisor kills this process or sends `StopChild`. The supervisor decides what the end of the
    engine or of a rank means for the worker. A worker that exited by itself would count as failed, and its KV memory would
    be given up."""
    logger.info(log.event(what, because=str(because)))
    with contextlib.suppress(ChannelClosed):
        while not isinstance(channel.wait_receive(), StopChild):
            pass


if __name__ == "__main__":
    main()
