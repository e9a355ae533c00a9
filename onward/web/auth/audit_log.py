"""The audit log: one line for each action that only an admin may do, with the caller, the action and the number of
targets. It never contains a key or a prompt."""

import logging

from onward import log
from onward.web.auth.api_key_table import Caller

_logger = logging.getLogger("onward.audit")
# Audit lines are written whatever the log level is.
_logger.setLevel(logging.INFO)


def log_action(caller: Caller, action: str, num_targets: int) -> None:
    _logger.info(log.event("audit", caller=caller.name or "anonymous", action=action, targets=num_targets))


def log_abort(caller: Caller, names: list[str] | None, aborted: list[str]) -> None:
    """Logs an abort that could reach requests of other callers: an abort of all requests, or one by the holder of an
    admin's key that has ended a request."""
    if names is None:
        log_action(caller, "abort_all", len(aborted))
    elif caller.is_admin and caller.name and aborted:
        log_action(caller, "abort", len(aborted))


def log_key_reload(num_keys: int) -> None:
    """Logs a reload of the keys by a signal. The sender of a signal has no name here."""
    _logger.info(log.event("audit", caller="signal", action="reload_keys", targets=num_keys))


def log_failed_key_reload(reason: str) -> None:
    _logger.error(log.event("audit", caller="signal", action="reload_keys", targets=0, refused=reason))
