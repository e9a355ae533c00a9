"""Waits for the ranks of a group to start, as rank 0 does."""

import select
from collections.abc import Mapping, Sequence

from onward.errors import StartupError
from onward.proto.rank import RankFailed, RankReply
from onward.transport.control_channel import ChannelClosed, ControlChannel


def wait_until_ready(channels: Sequence[ControlChannel]) -> None:
    """Waits for the replies of all ranks from 1 on at once: a failure is reported while other ranks still load. Raises
    `StartupError` if a rank cannot start."""
    poll, waiting = select.poll(), dict(enumerate(channels, start=1))
    for channel in channels:
        poll.register(channel, select.POLLIN)
    while waiting:
        ready_fds = {fd for fd, _ in poll.poll()}
        replies = {rank: _receive_reply(channel) for rank, channel in waiting.items() if channel.fileno() in ready_fds}
        if (error := _start_error(replies)) is not None:
            raise error
        for rank in replies:
            poll.unregister(waiting.pop(rank))


def ended_in_start(rank: int) -> StartupError:
    return StartupError(f"rank {rank} ended while it was starting; the lines above say why")


def _receive_reply(channel: ControlChannel) -> RankReply | None:
    """Returns the reply of a rank, or None if the rank has ended."""
    try:
        return channel.wait_receive()
    except ChannelClosed:
        return None


def _start_error(replies: Mapping[int, RankReply | None]) -> StartupError | None:
    """Returns the error of the ranks that have replied. A reason takes precedence over an end without one."""
    for rank, reply in replies.items():
        if isinstance(reply, RankFailed):
            return StartupError(f"rank {rank}: {reply.message}")
    return next((ended_in_start(rank) for rank, reply in replies.items() if reply is None), None)
