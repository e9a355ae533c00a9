"""One line for each thing that only an admin may do: who, what, and to how many. Never a key, and never a prompt."""

import logging

from onward import log
from onward.web.auth.api_key_table import Caller

_logger = logging.getLogger("onward.audit")
# Written whatever else the log leaves out.
_logger.setLevel(logging.INFO)


def log_action(caller: Caller, action: str, num_targets: int) -> None:
    _logger.info(log.event("audit", caller=caller.name or "anonymous", action=action, targets=num_targets))


def log_abort(caller: Caller, names: list[str] | None, aborted: list[str]) -> None:
    """Where somebody could reach the requests of others, and has ended some, or has asked for all."""
    if names is None:
        log_action(caller, "abort_all", len(aborted))
    elif caller.is_admin and caller.name and aborted:
        log_action(caller, "abort", len(aborted))


def log_key_reload(num_keys: int) -> None:
    """By a signal: whoever sent it has no name here."""
    _logger.info(log.event("audit", caller="signal", action="reload_keys", targets=num_keys))


def log_failed_key_reload(reason: str) -> None:
    _logger.error(log.event("audit", caller="signal", action="reload_keys", targets=0, refused=reason))
