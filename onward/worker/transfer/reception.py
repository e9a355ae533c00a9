"""Where writers come in: accepts connections, has them prove themselves, and passes on to the sink what they say.

A connection that broke the rules is not simply closed: its writer might still have our memory mapped. It sees our end of
the stream, stops and closes its own; until then the sink holds on to its leases.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from onward import log
from onward.proto.kv_transfer import Layout
from onward.worker.transfer.backend import Invitation, Receiver
from onward.worker.transfer.channel import Garbled, LinkLost
from onward.worker.transfer.handshake import Secret
from onward.worker.transfer.link import Door, ReceiverLink
from onward.worker.transfer.poller import Poller
from onward.worker.transfer.sink import RuleBroken, Sink

HANDSHAKE_S = 5.0
IDLE_S = 120.0
"""Longer than writers keep an idle connection: so it is they who close it, and not under a lease that is on its way."""
MAX_CONNECTIONS = 128

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Visitor:
    number: int
    link: ReceiverLink
    since_s: float
    active_s: float
    num_received: int = 0
    is_expelled: bool = False
    """It has broken the rules; we only wait for its end."""


class Reception:
    def __init__(
        self,
        door: Door,
        poller: Poller,
        sink: Sink,
        receiver: Receiver,
        *,
        secret: Secret,
        incarnation: str,
        layout: Layout,
        num_blocks: int,
        can_expel: bool,
        now_s: Callable[[], float],
    ) -> None:
        self._door, self._poller, self._sink, self._receiver, self._now_s = door, poller, sink, receiver, now_s
        self._secret, self._incarnation, self._layout, self._num_blocks = secret, incarnation, layout, num_blocks
        self._can_expel = can_expel
        self._visitors: dict[int, _Visitor] = {}
        self._num_seen = 0
        poller.watch(door, self._accept)

    @property
    def num_connections(self) -> int:
        return len(self._visitors)

    def turn(self) -> None:
        """Sends what waits, and closes what has been silent for too long."""
        now_s = self._now_s()
        for visitor in list(self._visitors.values()):
            self._flush(visitor)
            self._judge_silence(visitor, now_s)
        if self._can_expel:
            for number in self._sink.overdue_writers(now_s) & self._visitors.keys():
                self._end(self._visitors[number], "it did not stop in time")

    def close(self) -> None:
        for visitor in list(self._visitors.values()):
            self._end(visitor, "the worker is leaving")
        self._poller.forget(self._door)
        self._door.close()

    def _accept(self) -> None:
        while (sock := self._door.accept()) is not None:
            if len(self._visitors) >= MAX_CONNECTIONS:
                logger.warning(log.event("kv connection refused", because="too many", limit=MAX_CONNECTIONS))
                sock.close()
                continue
            self._num_seen += 1
            number = self._num_seen
            link = ReceiverLink(sock, self._secret, self._incarnation, self._layout, lambda n=number: self._invite(n))
            visitor = self._visitors[number] = _Visitor(number, link, self._now_s(), self._now_s())
            self._poller.watch(link.channel, lambda v=visitor: self._listen(v))

    def _invite(self, number: int) -> Invitation:
        invitation = self._receiver.invite(number)
        self._sink.welcome(number, self._visitors[number].link.channel)
        return invitation

    def _listen(self, visitor: _Visitor) -> None:
        try:
            if visitor.is_expelled:
                visitor.link.channel.skip()
                return
            for message in visitor.link.messages(self._num_blocks):
                self._sink.hear(visitor.number, message, self._now_s())
            self._flush(visitor)
        except RuleBroken as fault:
            self._expel(visitor, str(fault))
        except Garbled as garbled:
            self._expel(visitor, str(garbled))
        except LinkLost as lost:
            self._end(visitor, str(lost))
        else:
            if visitor.link.is_refused:
                self._end(visitor, "it was refused")

    def _flush(self, visitor: _Visitor) -> None:
        if visitor.is_expelled:
            return
        channel = visitor.link.channel
        try:
            channel.flush()
        except LinkLost as lost:
            # Not read to the end yet: what the writer said last may still be there, and tells more than this.
            self._expel(visitor, str(lost))
            return
        self._poller.watch(channel, lambda: self._listen(visitor), for_writing=channel.wants_to_write)

    def _judge_silence(self, visitor: _Visitor, now_s: float) -> None:
        received = visitor.link.channel.num_received
        if received != visitor.num_received:
            visitor.num_received, visitor.active_s = received, now_s
        if not visitor.link.is_open and now_s - visitor.since_s > HANDSHAKE_S:
            self._end(visitor, f"it has not introduced itself within {HANDSHAKE_S:g} s")
        elif now_s - visitor.active_s > IDLE_S and not self._sink.has_writer(visitor.number):
            self._end(visitor, "it has been idle")

    def _expel(self, visitor: _Visitor, reason: str) -> None:
        if visitor.number in self._visitors and not visitor.is_expelled:
            visitor.is_expelled = True
            logger.warning(log.event("kv connection given up", writer=visitor.number, because=reason))
            self._sink.give_up(visitor.number, reason)
            visitor.link.channel.say_no_more()
            self._poller.watch(visitor.link.channel, lambda: self._listen(visitor))

    def _end(self, visitor: _Visitor, reason: str) -> None:
        if self._visitors.pop(visitor.number, None) is None:
            return
        self._poller.forget(visitor.link.channel)
        visitor.link.close()
        self._sink.lose(visitor.number, reason)
