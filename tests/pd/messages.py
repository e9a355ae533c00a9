"""Handoff messages with everything that does not matter to the two sides filled in."""

from onward.pd.handoff_timeouts import HandoffTimeouts
from onward.proto.handoff import LeaseGrant, PrefillRequest
from onward.proto.kv_transfer import KvEndpoint, KvLayout
from onward.proto.sampling_params import SamplingParams

TIMES = HandoffTimeouts(lease_s=5.0, offer_hold_s=0.5, handoff_timeout_s=60.0)
LAYOUT = KvLayout("weights-and-kernels", "float16", 16, 30, 3, 64)
ENDPOINT = KvEndpoint("tcp", "tcp:127.0.0.1:7000", "decode-worker-1")


def prefill(number: int) -> PrefillRequest:
    return PrefillRequest(number, LAYOUT, f"request-{number}", [1, 2, 3], 3, SamplingParams(seed=0))


def grant(
    handoff_id: int, lease_id: str = "lease-1", *, checksums: bool = True, lease_s: float = TIMES.lease_s
) -> LeaseGrant:
    """As the engine gives it to the protocol, which fills in the incarnation."""
    return LeaseGrant(handoff_id, "", lease_id, ENDPOINT, 0, [7, 8], lease_s, checksums)
