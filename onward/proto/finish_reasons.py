"""Finish reasons that more than one process decides by. `stop`, `length` and `error` only travel."""

ABORT = "abort"
"""The client has ended the output by `/v1/abort`."""
PD_RESCHEDULE = "pd_reschedule"
"""The instance cannot go on; another one can."""
INCOMPLETE_REASONS = frozenset({ABORT, PD_RESCHEDULE})
"""Of an output that is not complete. The client is told how to continue it."""
