"""The shelf process: a socket and the clock around `ShelfCore`. Started by the supervisor before the api processes.

One per instance. What it keeps dies with it: then a client's reconnect is answered as if its stream were unknown, and it
repeats its POST.
"""

import argparse
import logging
from typing import Protocol

import msgspec

from onward import log
from onward.clock import Clock, SystemClock
from onward.proto.control import ApiGone, AskSnapshot, FromChild, Ready, Snapshot, StartShelf, Stop, ToChild
from onward.proto.shelf import FromShelf, ToShelf
from onward.shelf.core import Letters, ShelfCore
from onward.transport.control import ChannelClosed, join_supervisor
from onward.transport.zmq import Wires

TICK_MS = 50
MAX_INBOX_PER_TURN = 1000
"""So that a flood of records cannot keep the supervisor waiting."""

logger = logging.getLogger(__name__)


class Channel(Protocol):
    """What `transport.control.ControlChannel` does."""

    def send(self, message: FromChild) -> bool: ...
    def receive(self) -> ToChild | None: ...


class Port(Protocol):
    """What `transport.shelf.ShelfPort` does."""

    def receive(self) -> tuple[str, ToShelf] | None: ...
    def send(self, receiver: str, message: FromShelf) -> bool: ...


class ShelfProcess:
    """The simulator brings a channel, a port and a clock of its own, and calls `turn` when something has arrived."""

    def __init__(self, channel: Channel, port: Port, clock: Clock) -> None:
        self.core = ShelfCore()
        self.is_stopped = False
        self._channel, self._port, self._clock = channel, port, clock
        channel.send(Ready())

    def turn(self) -> None:
        """All that has arrived, then all that is due."""
        now_s = self._clock.now_s()
        while (told := self._channel.receive()) is not None:
            self._on_control(told, now_s)
        for _ in range(MAX_INBOX_PER_TURN):
            try:
                received = self._port.receive()
            except msgspec.DecodeError as fault:
                logger.warning(log.event("message dropped", fault=str(fault)))
                continue
            if received is None:
                break
            self._post(self.core.receive(*received, now_s), now_s)
        self._post(self.core.tick(now_s), now_s)

    def _on_control(self, message: ToChild, now_s: float) -> None:
        match message:
            case ApiGone():
                self._post(self.core.api_gone(message.incarnation, now_s), now_s)
            case AskSnapshot():
                self._channel.send(Snapshot(message.ask_id, self.core.registry.snapshot()))
            case Stop():
                self.is_stopped = True
            case _:
                logger.warning(log.event("unexpected message", kind=type(message).__name__))

    def _post(self, letters: Letters, now_s: float) -> None:
        for receiver, message in letters:
            if not self._port.send(receiver, message):
                # What follows answers others, so it ends: nobody is asked a second time.
                self._post(self.core.unreached(receiver, message, now_s), now_s)


def main() -> None:
    parser = argparse.ArgumentParser(prog="onward.shelf.main")
    parser.add_argument("--control-fd", type=int, required=True)
    channel = join_supervisor(parser.parse_args().control_fd)
    start = channel.wait_receive()
    assert isinstance(start, StartShelf), "the first message says what to be"
    log.set_up("shelf", start.log_level)
    wires = Wires()
    wires.watch_fd(channel.fileno())
    try:
        process = ShelfProcess(channel, wires.shelf_port(start.address), SystemClock())
        while not process.is_stopped:
            wires.wait(TICK_MS)
            process.turn()
    except ChannelClosed:
        logger.warning("the supervisor is gone")
    finally:
        wires.close()


if __name__ == "__main__":
    main()
