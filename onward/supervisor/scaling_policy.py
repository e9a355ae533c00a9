"""Decides how many instances a model gets, from the load of its present instances.

Instances are added when the load has been high for a while, and removed one at a time when it has been low for longer.
Between the two bounds nothing changes, so a constant load does not add and remove instances in turn.
"""

import math
from dataclasses import dataclass

HIGH_USAGE = 0.8
"""From this usage on, instances are added."""
WANTED_USAGE = 0.6
"""After an addition."""
LOW_USAGE = 0.5
"""An instance is removed if the usage of the others would not be above this."""


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Load of the ready instances of one model that take requests."""

    num_ready: int
    num_running: int = 0
    num_waiting: int = 0
    """In the instances, and at the router."""
    max_running: int = 0
    kv_usage: float = 0.0
    """Part of the KV blocks that requests hold."""

    @property
    def usage(self) -> float:
        """Returns the requests as a part of what can run at once, or the usage of KV memory, whichever is higher."""
        slots = (self.num_running + self.num_waiting) / self.max_running if self.max_running else 0.0
        return max(slots, self.kv_usage)


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    minimum: int
    maximum: int
    up_after_s: float = 5.0
    down_after_s: float = 120.0


@dataclass(slots=True)
class ScalingPolicy:
    limits: ScalingLimits
    _high_since_s: float | None = None
    _low_since_s: float | None = None

    def target(self, num_instances: int, figures: LoadFigures | None, now_s: float) -> int:
        """Returns the number of instances to run from now on. A number outside the limits is moved to the nearest
        limit. Otherwise, `num_instances` is kept if `figures` is None or no instance is ready. Keeps track of how
        long the load has been high or low, so it must be called regularly."""
        limits = self.limits
        if not limits.minimum <= num_instances <= limits.maximum:
            self.restart()
            return min(max(num_instances, limits.minimum), limits.maximum)
        if figures is None or not figures.num_ready:
            self.restart()
            return num_instances
        self._high_since_s = _since(self._high_since_s, now_s, holds=figures.usage >= HIGH_USAGE)
        self._low_since_s = _since(self._low_since_s, now_s, holds=_is_low(figures))
        if _has_held(self._high_since_s, limits.up_after_s, now_s) and num_instances < limits.maximum:
            self.restart()
            wanted = math.ceil(figures.num_ready * figures.usage / WANTED_USAGE)
            return min(max(wanted, num_instances + 1), limits.maximum)
        if _has_held(self._low_since_s, limits.down_after_s, now_s) and num_instances > limits.minimum:
            self.restart()
            return num_instances - 1
        return num_instances

    def restart(self) -> None:
        """Forgets for how long the load has been high or low, after each change."""
        self._high_since_s = self._low_since_s = None


def _is_low(figures: LoadFigures) -> bool:
    num_others = figures.num_ready - 1
    return num_others > 0 and figures.usage * figures.num_ready / num_others <= LOW_USAGE


def _since(since_s: float | None, now_s: float, *, holds: bool) -> float | None:
    if not holds:
        return None
    return now_s if since_s is None else since_s


def _has_held(since_s: float | None, wanted_s: float, now_s: float) -> bool:
    return since_s is not None and now_s - since_s >= wanted_s
