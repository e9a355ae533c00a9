"""The ways in which a handoff fails, as the typed errors that both sides and the client are told."""

from onward.proto.engine import ErrorInfo

SILENCE_STAGE = "silence"
"""The stage of a failure that says more of the peer than of what it was asked."""

WORKER_CRASH_STAGE = "worker_crash"
"""The stage of a failure that says: a worker died over this prompt."""


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
    """Nothing was heard of the prefill instance: it may be dead, or the way to it."""
    code = "pd_lease_expired" if granted else "pd_prefill_failed"
    return _pd_error(code, SILENCE_STAGE, f"the prefill instance was silent for {seconds:g} s")


def layout_mismatch(difference: str) -> ErrorInfo:
    """It stays so, however often one asks."""
    return _pd_error("pd_layout_mismatch", "prefill", f"the peers cannot exchange KV: {difference}", retryable=False)


def _pd_error(code: str, stage: str, message: str, *, retryable: bool = True) -> ErrorInfo:
    return ErrorInfo(code, f"PD Error: {message}", status=503, retryable=retryable, stage=stage)
