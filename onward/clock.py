"""The clock as a dependency.

Pure code takes `now_s` as an argument; each process owns one `Clock` and reads it. The simulator passes its own.
"""

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Returns monotonic seconds, comparable within one process only."""
        ...

    def wall_s(self) -> float:
        """Returns seconds since 1970, for values that people and other machines read."""
        ...


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()
