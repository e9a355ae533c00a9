"""Hand-over messages with everything that does not matter to the two sides filled in."""

from onward.pd.handoff import Lease, Times
from onward.proto.handoff import Prefill
from onward.proto.kv_transfer import Endpoint, Layout
from onward.proto.sampling import Sampling

TIMES = Times(lease_s=5.0, offer_hold_s=0.5, handover_timeout_s=60.0)
LAYOUT = Layout("weights-and-kernels", "float16", 16, 30, 3, 64)
ENDPOINT = Endpoint("tcp", "tcp:127.0.0.1:7000", "decode-worker-1")


def prefill(number: int) -> Prefill:
    return Prefill(number, LAYOUT, f"request-{number}", [1, 2, 3], 3, Sampling(seed=0))


def lease(lease_id: str, block_ids: list[int] | None = None, *, checksums: bool = True) -> Lease:
    return Lease(lease_id, ENDPOINT, 0, block_ids or [7, 8], checksums)
