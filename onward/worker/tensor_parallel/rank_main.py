"""The process of a rank other than 0. The supervisor starts it together with rank 0, which says what to load.

It needs neither tokenizer nor grammars nor HTTP. It exits by itself only for a fault of its own. When rank 0 is gone, it
waits until the supervisor kills it: an exit could be taken for the reason why the group has ended.
"""

import argparse
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

from onward import log
from onward.config import quiet_torch
from onward.errors import OnwardError
from onward.models.loader.weights import open_weights
from onward.models.sharding.rank_lost import RankLost
from onward.proto.rank import RankFailed, RankReady, StartRank, StartShard, ToRank
from onward.transport.control_channel import ChannelClosed, ControlChannel, depend_on_supervisor
from onward.worker.tensor_parallel.rank_model import RankModel

Loaded = TypeVar("Loaded")

logger = logging.getLogger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(prog="onward.worker.tensor_parallel.rank_main")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--supervisor-pid", type=int, required=True)
    args = parser.parse_args()
    depend_on_supervisor(args.supervisor_pid)
    channel = ControlChannel(args.control_fd, ToRank)
    with contextlib.suppress(ChannelClosed, RankLost):
        _serve(channel, channel.wait_receive())
    channel.close()
    _wait_to_be_killed()


def _serve(channel: ControlChannel, start: StartRank | StartShard) -> None:
    """Takes part in the steps of rank 0 until rank 0 is gone."""
    log.configure(f"rank-{start.rank}", start.config.log_level, start.config.log_format)
    if isinstance(start, StartRank):
        _serve_int8(channel, start)
    else:
        _serve_shard(channel, start)


def _serve_int8(channel: ControlChannel, start: StartRank) -> None:
    fds = channel.take_fds()
    model = _loaded(channel, lambda: RankModel(start, open_weights(start.model), *fds))
    if model is not None:
        threading.Thread(target=_follow, args=(model,), name="follow", daemon=True).start()
        channel.send(RankReady())
    channel.wait_receive()  # rank 0 sends nothing after the start; the end of the channel is its end


def _serve_shard(channel: ControlChannel, start: StartShard) -> None:
    from onward.worker.tensor_parallel.following_device import FollowingDevice

    quiet_torch()
    fds = channel.take_fds()
    device = _loaded(channel, lambda: FollowingDevice(start, fds, on_loaded=lambda: channel.send(RankReady())))
    while True:
        step = channel.wait_receive()
        if device is not None:
            device.run(step)


def _loaded(channel: ControlChannel, load: Callable[[], Loaded]) -> Loaded | None:
    """Returns what `load` returns. If the model cannot be loaded, tells rank 0 why and returns None."""
    try:
        return load()
    except OnwardError as error:
        failed = RankFailed(error.message)
    except MemoryError as error:
        failed = RankFailed(f"out of memory while loading the model ({error})")
    logger.error(log.event("the rank cannot start", why=failed.message))
    channel.send(failed)
    return None


def _wait_to_be_killed() -> NoReturn:
    """Waits for the supervisor's SIGKILL. The kernel sends it if the supervisor is dead."""
    while True:
        signal.pause()


def _follow(model: RankModel) -> None:
    try:
        model.follow()
    except BaseException:
        logger.exception("the rank has failed")
        os._exit(1)


if __name__ == "__main__":
    main()
