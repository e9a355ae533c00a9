"""The ways in which a handoff fails, as typed errors for both sides and the client."""

from onward.proto.engine import ErrorInfo

SILENCE_STAGE = "silence"
"""The stage of a failure that concerns the peer rather than the request."""

WORKER_CRASH_STAGE = "worker_crash"
"""The stage of a failure in which a worker died over this prompt."""


def no_decode_blocks(message: str) -> ErrorInfo:
    return _pd_error("pd_no_decode_blocks", "offer", message)


def prefill_failed(message: str) -> ErrorInfo:
    return _pd_error("pd_prefill_failed", "prefill", message)


def worker_crashed(message: str) -> ErrorInfo:
    return _pd_error("pd_prefill_failed", WORKER_CRASH_STAGE, message)


def transfer_failed(message: str) -> ErrorInfo:
    return _pd_error("pd_transfer_failed", "transfer", message)


def lease_expired(message: str) -> ErrorInfo:
    return _pd_error("pd_lease_expired", "transfer", message)


def peer_silent(seconds: float, *, granted: bool) -> ErrorInfo:
    """Returns the error of a handoff without a message from the prefill instance for `seconds`. The instance may be
    dead, or the connection to it. The code depends on whether a lease was `granted`."""
    code = "pd_lease_expired" if granted else "pd_prefill_failed"
    return _pd_error(code, SILENCE_STAGE, f"the prefill instance was silent for {seconds:g} s")


def layout_mismatch(difference: str) -> ErrorInfo:
    """Returns the error of peers whose KV layouts differ. It is not retryable, because the layouts do not change."""
    return _pd_error("pd_layout_mismatch", "prefill", f"the peers cannot exchange KV: {difference}", retryable=False)


def _pd_error(code: str, stage: str, message: str, *, retryable: bool = True) -> ErrorInfo:
    return ErrorInfo(code, f"PD Error: {message}", status=503, retryable=retryable, stage=stage)
