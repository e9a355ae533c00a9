"""Time, passed in.

Pure code takes `now_s` as an argument; a process's rim owns one `Clock` and reads it. The simulator passes another.
"""

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds that only go forward. Comparable within one process only."""
        ...

    def wall_s(self) -> float:
        """Seconds since 1970, for what people and other machines read."""
        ...


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()
