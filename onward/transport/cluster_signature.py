"""Signs and verifies HTTP requests between routers and instances, which shows that the sender holds the cluster key.

The header is `TIME:MAC`: Unix time in seconds, and a keyed hash over the time, the method, the path and the body. A
signature is valid for a minute, so clocks may differ by that much. Without a cluster key there are no signatures, and
all addresses are local.
"""

import hashlib
import hmac

MAX_AGE_S = 60.0


def sign_request(cluster_key: str, method: str, path: str, body: bytes, wall_s: float) -> str:
    assert cluster_key, "without a key there is nothing to prove"
    timestamp = str(int(wall_s))
    return f"{timestamp}:{_mac(cluster_key, timestamp, method, path, body)}"


def verify_signature(cluster_key: str, header: str | None, method: str, path: str, body: bytes, wall_s: float) -> bool:
    timestamp, _, mac = (header or "").partition(":")
    if (
        not (timestamp.isascii() and timestamp.isdecimal())
        or len(timestamp) > 12
        or abs(wall_s - int(timestamp)) > MAX_AGE_S
    ):
        return False
    return hmac.compare_digest(mac.encode(), _mac(cluster_key, timestamp, method, path, body).encode())


def _mac(cluster_key: str, timestamp: str, method: str, path: str, body: bytes) -> str:
    digest = hashlib.blake2b(key=bytes.fromhex(cluster_key), digest_size=32, person=b"onward router")
    for part in (timestamp.encode(), method.encode(), path.encode(), body):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
