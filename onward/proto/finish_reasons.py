"""Finish reasons on which several processes base decisions. `stop`, `length` and `error` are only passed on."""

ABORT = "abort"
"""The client has ended the output by `/v1/abort`."""
PD_RESCHEDULE = "pd_reschedule"
"""The instance cannot go on; another one can."""
INCOMPLETE_REASONS = frozenset({ABORT, PD_RESCHEDULE})
"""Finish reasons of an incomplete output. The client gets the fields that continue it."""
