"""The processes that the buttons of `--demo` can kill."""

from typing import Literal

import msgspec

KillTarget = Literal["worker", "engine", "instance"]


class RequestKill(msgspec.Struct, frozen=True, tag="request_kill"):
    """From an api process of a server with `--demo`: kill this process, or the whole instance. Any other supervisor ignores
    it."""

    target: KillTarget
