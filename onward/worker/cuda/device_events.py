"""Places in the stream of work: whether the device has passed them, and waiting until it has."""

from typing import Protocol

import torch


class DeviceEvent(Protocol):
    def is_done(self) -> bool: ...
    def wait(self) -> None: ...


class CudaEvent:
    """Behind all that was launched before it is made."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def is_done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


class CompletedEvent:
    """Where work is done when it is called for."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


def record_event(device: str) -> DeviceEvent:
    return CompletedEvent() if device == "cpu" else CudaEvent()
