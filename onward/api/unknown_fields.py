"""Counts the request fields that no endpoint knows, and logs each name once."""

import logging

from onward import log
from onward.api.requests.unsupported_fields import format_names
from onward.obs.metrics import Counter

MAX_LOGGED = 256
"""Names that are logged in a process's life: clients choose them."""

_logger = logging.getLogger(__name__)


class UnknownFieldReporter:
    def __init__(self, counter: Counter, max_logged: int = MAX_LOGGED) -> None:
        self._counter = counter
        self._max_logged = max_logged
        self._logged: set[str] = set()

    def report(self, names: tuple[str, ...], path: str, request_id: str) -> None:
        if not names:
            return
        self._counter.inc(by=len(names))
        new = [name for name in names if name not in self._logged][: self._max_logged - len(self._logged)]
        if new:
            self._logged.update(new)
            _logger.warning(
                log.event(
                    "request has unknown fields",
                    fields=format_names(new),
                    path=path,
                    request=request_id,
                    action="ignored",
                )
            )
