"""Handoff messages with everything that does not matter to the two sides filled in."""

from onward.pd.handoff import GrantedLease, HandoffTimeouts
from onward.proto.handoff import PrefillRequest
from onward.proto.kv_transfer import KvEndpoint, KvLayout
from onward.proto.sampling_params import SamplingParams

TIMES = HandoffTimeouts(lease_s=5.0, offer_hold_s=0.5, handoff_timeout_s=60.0)
LAYOUT = KvLayout("weights-and-kernels", "float16", 16, 30, 3, 64)
ENDPOINT = KvEndpoint("tcp", "tcp:127.0.0.1:7000", "decode-worker-1")


def prefill(number: int) -> PrefillRequest:
    return PrefillRequest(number, LAYOUT, f"request-{number}", [1, 2, 3], 3, SamplingParams(seed=0))


def lease(lease_id: str, block_ids: list[int] | None = None, *, checksums: bool = True) -> GrantedLease:
    return GrantedLease(lease_id, ENDPOINT, 0, block_ids or [7, 8], checksums)
