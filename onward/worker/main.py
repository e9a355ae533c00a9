"""The worker process: takes plans from the wire, runs them, sends results. Started by the supervisor.

It holds no policy, and has no way to lose a step: a fault that is not one request's own ends the process.
"""

import argparse
import logging
import sys

from onward import log
from onward.errors import OnwardError
from onward.models.loading import open_weights
from onward.proto.control import Progress, StartFailed, StartWorker, Stop
from onward.transport.control import ChannelClosed, ControlChannel, join_supervisor
from onward.transport.shm import WireBroken
from onward.transport.worker_wire import open_worker_end
from onward.transport.zmq import Wires
from onward.worker.runner import Runner
from onward.worker.transfer.plane import KvMemory, Plane

_SWITCH_S = 0.0005

logger = logging.getLogger(__name__)


class WorkerProcess:
    def __init__(self, start: StartWorker, channel: ControlChannel) -> None:
        self._channel = channel
        self._tell("loading the model")
        self._runner = Runner(start.model, start.config, open_weights(start.model))
        self._runner.warm_up(self._tell)
        self._wires = Wires()
        self._wires.watch_fd(channel.fileno())
        self._plans = open_worker_end(self._wires, start.wire)
        self._plane = _open_plane(start, self._runner) if start.kv_address else None
        endpoint = None if self._plane is None else self._plane.endpoint
        self._plans.send(self._runner.hello(start.incarnation, start.engine_incarnation, endpoint))

    def run(self) -> None:
        while True:
            self._wires.wait()
            if isinstance(self._channel.receive(), Stop):
                return
            while (plan := self._plans.receive()) is not None:
                self._plans.send(self._runner.step(plan))

    def close(self) -> None:
        if self._plane is not None:
            self._plane.close()
        self._wires.close()

    def _tell(self, message: str) -> None:
        self._channel.send(Progress(message))


def _open_plane(start: StartWorker, runner: Runner) -> Plane:
    pool = runner.kv_pool
    plane = Plane(
        KvMemory(pool.data, pool.fd, pool.geometry, runner.layout),
        backend=start.config.kv_backend,
        host=start.config.kv_host,
        port=start.config.kv_port,
        incarnation=start.incarnation,
        cluster_key=start.cluster_key,
        layers_done=runner.layers_done,
    )
    runner.kv_feed = plane
    # Else the plane's thread, while it hashes blocks, could hold up a step for several times Python's default, 5 ms.
    sys.setswitchinterval(_SWITCH_S)
    wires = Wires()  # its thread's own: sockets are not shared between threads
    plane.start(wires, wires.kv_socket(start.kv_address))
    return plane


def main() -> None:
    parser = argparse.ArgumentParser(prog="onward.worker.main")
    parser.add_argument("--control-fd", type=int, required=True)
    channel = join_supervisor(parser.parse_args().control_fd)
    start = channel.wait_receive()
    assert isinstance(start, StartWorker), "the first message says what to be"
    log.set_up("worker", start.config.log_level)
    try:
        process = WorkerProcess(start, channel)
    except OnwardError as error:
        channel.send(StartFailed(error.message))
        return
    except MemoryError as error:
        channel.send(StartFailed(f"out of memory while loading the model ({error}); try a smaller --num-kv-blocks"))
        return
    try:
        process.run()
    except (ChannelClosed, WireBroken) as gone:
        logger.warning(log.event("leaving", because=str(gone)))
    finally:
        process.close()


if __name__ == "__main__":
    main()
