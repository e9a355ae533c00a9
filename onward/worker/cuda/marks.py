"""Places in the stream of work: whether the device has passed them, and waiting until it has."""

from typing import Protocol

import torch


class Mark(Protocol):
    def is_passed(self) -> bool: ...
    def wait(self) -> None: ...


class CudaMark:
    """Behind all that was launched before it is made."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def is_passed(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


class PassedMark:
    """Where work is done when it is called for."""

    def is_passed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


def mark_on(device: str) -> Mark:
    return PassedMark() if device == "cpu" else CudaMark()
