"""Instances as they register and as they are chosen from, with everything that does not matter filled in."""

import msgspec

from onward.proto import SCHEMA_VERSION
from onward.proto.kv_transfer import KvLayout
from onward.proto.router import InstanceLoad, Registration
from onward.router.instance_registry import InstanceInfo, InstanceState

LAYOUT = KvLayout("weights-and-kernels", "float16", 16, 30, 3, 64)
A_REPLICA = InstanceInfo(
    instance_id="a",
    url="http://a",
    role="mixed",
    state=InstanceState.READY,
    fingerprint=LAYOUT.fingerprint,
    handoff_address="",
    max_tokens=1000,
    block_size=16,
    load=InstanceLoad(max_running=10, num_blocks=100, free_blocks=100),
    num_reserved=0,
    circuit_open_until_s=0.0,
)
A_REGISTRATION = Registration(
    schema_version=SCHEMA_VERSION,
    instance="a",
    url="http://a",
    role="mixed",
    state="ready",
    model="a-model",
    fingerprint=LAYOUT.fingerprint,
    kv_layout=LAYOUT,
    max_tokens=1000,
    block_size=16,
)


def registration(instance: str, /, **changes: object) -> Registration:
    return msgspec.structs.replace(A_REGISTRATION, **{"instance": instance, "url": f"http://{instance}", **changes})
