"""How an instance stands with one router, as the log tells it: a line when it is not taken, one when it is again.

Knows nothing of messages; who speaks with the router says how that went.
"""

import logging

from onward import log
from onward.clock import Clock

PATIENCE_S = 15.0
"""How long a router that has answered before may be silent until that is worth a warning: longer than one that stops takes
by default (`drain_s` and its last words), and than a restart. Whoever stops a cluster stops the router first."""

_logger = logging.getLogger(__name__)


class RegistrationLog:
    def __init__(self, router_url: str, clock: Clock) -> None:
        self._url = router_url
        self._clock = clock
        self._answered_at_s: float | None = None
        self._has_warned = False

    def accepted(self) -> None:
        self._answered_at_s = self._clock.now_s()
        if self._has_warned:
            self._has_warned = False
            _logger.info(log.event("registered", url=self._url))

    def refused(self, cause: str) -> None:
        """It has answered, and said no."""
        self._answered_at_s = self._clock.now_s()
        self._warn(cause)

    def unreachable(self, cause: str) -> None:
        """It has not answered. One that never did may have another address."""
        if self._answered_at_s is None or self._clock.now_s() - self._answered_at_s > PATIENCE_S:
            self._warn(cause)

    def _warn(self, cause: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(log.event("router does not take us", url=self._url, cause=cause))
