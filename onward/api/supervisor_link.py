"""An api process's conversation with its supervisor: who serves, what the whole instance looks like, when to leave."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Protocol

from onward.errors import Unavailable
from onward.proto.control import (
    AskDrain,
    AskInstance,
    AskSnapshot,
    AskUndrain,
    Drain,
    EngineGone,
    EngineUp,
    FromChild,
    InstanceView,
    NewKeys,
    ShelfGone,
    ShelfUp,
    Snapshot,
    Stop,
    ToChild,
    Undrain,
)
from onward.proto.stats import Family

ASK_TIMEOUT_S = 3.0


class Channel(Protocol):
    """What `transport.control.ControlChannel` does."""

    def send(self, message: FromChild) -> bool: ...
    def receive(self) -> ToChild | None: ...


class Listener(Protocol):
    def engine_up(self, message: EngineUp) -> None: ...
    def engine_gone(self, message: EngineGone) -> None: ...


class ShelfListener(Protocol):
    def shelf_up(self, message: ShelfUp) -> None: ...
    def shelf_gone(self, message: ShelfGone) -> None: ...


class SupervisorLink:
    def __init__(self, channel: Channel, snapshot: Callable[[], list[Family]]) -> None:
        self._channel = channel
        self._snapshot = snapshot
        self._ask_ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[InstanceView]] = {}

    def read(
        self,
        listener: Listener,
        shelf: ShelfListener,
        drain: Callable[[], None],
        undrain: Callable[[], None],
        stop: Callable[[float], None],
        new_keys: Callable[[NewKeys], None],
    ) -> None:
        """Acts on every message that is there. The channel raises when the supervisor has died."""
        while (message := self._channel.receive()) is not None:
            match message:
                case EngineUp():
                    listener.engine_up(message)
                case EngineGone():
                    listener.engine_gone(message)
                case ShelfUp():
                    shelf.shelf_up(message)
                case ShelfGone():
                    shelf.shelf_gone(message)
                case AskSnapshot():
                    self._channel.send(Snapshot(message.ask_id, self._snapshot()))
                case InstanceView():
                    self._answered(message)
                case Drain():
                    drain()
                case Undrain():
                    undrain()
                case NewKeys():
                    new_keys(message)
                case Stop():
                    stop(message.grace_s)
                case _:
                    raise AssertionError(f"not a message for an api process: {type(message).__name__}")

    def ask_drain(self) -> None:
        """For the whole instance: the supervisor tells every api process."""
        if not self._channel.send(AskDrain()):
            raise Unavailable("the supervisor does not read", retry_after_s=1.0)

    def ask_undrain(self) -> None:
        if not self._channel.send(AskUndrain()):
            raise Unavailable("the supervisor does not read", retry_after_s=1.0)

    async def instance(self) -> InstanceView:
        """The whole instance, as of now."""
        ask_id = next(self._ask_ids)
        answer = self._asked[ask_id] = asyncio.get_running_loop().create_future()
        try:
            if not self._channel.send(AskInstance(ask_id)):
                raise Unavailable("the supervisor does not read")
            return await asyncio.wait_for(answer, ASK_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(f"the supervisor did not answer within {ASK_TIMEOUT_S:g} s") from None
        finally:
            del self._asked[ask_id]

    def _answered(self, view: InstanceView) -> None:
        answer = self._asked.get(view.ask_id)
        if answer is not None and not answer.done():
            answer.set_result(view)
