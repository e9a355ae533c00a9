"""How long and how often a stream is resumed before it fails, and how large its events may be. Times may be `math.inf`."""

from collections.abc import Callable
from dataclasses import dataclass

OnResume = Callable[[float, int], None]
"""Called with the length of the pause in seconds and the number of the connection, when events arrive again."""


@dataclass(frozen=True, slots=True)
class ResumeOptions:
    max_failures: int = 12
    """Failed connections in a row; a connection that delivers an event starts the count again."""
    first_delay_s: float = 0.2
    """The delay before the next connection. It doubles with each failure in a row; up to a half is taken off at random."""
    max_delay_s: float = 5.0
    deadline_s: float = 3600.0
    """Time limit of the whole stream. It is checked when bytes arrive and before each connection."""
    read_timeout_s: float = 300.0
    """A connection that delivers no byte for this long counts as lost. A request may wait in a queue before its first
    event."""
    connect_timeout_s: float = 10.0
    max_event_bytes: int = 256 << 20
    """Bound of the memory for one event, and for events that are held until the next one with an id. The last event of
    `/v1/responses` contains the whole output; with 20 `top_logprobs` that is about 1.5 KB for each token."""

    def __post_init__(self) -> None:
        for name in ("first_delay_s", "max_delay_s", "deadline_s", "read_timeout_s", "connect_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: must be above 0, got {getattr(self, name)}")
        if self.max_failures < 0:
            raise ValueError(f"max_failures: must be at least 0, got {self.max_failures}")
        if self.max_event_bytes < 1:
            raise ValueError(f"max_event_bytes: must be at least 1, got {self.max_event_bytes}")
