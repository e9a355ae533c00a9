"""Events in a device's stream of work: whether the device has reached them, and waiting until it has."""

from typing import Protocol

import torch


class DeviceEvent(Protocol):
    def is_done(self) -> bool: ...
    def wait(self) -> None: ...


class CudaEvent:
    """Done when all work that was launched before its creation is done."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def is_done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


class CompletedEvent:
    """The event of a device that does all work in the call."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


def record_event(device: str) -> DeviceEvent:
    return CompletedEvent() if device == "cpu" else CudaEvent()
