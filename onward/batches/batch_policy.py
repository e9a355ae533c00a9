"""The limits of files and batches, and what is decided from them. Pure functions; no disk, no clock."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from onward.batches.batch_files import BatchRequest
from onward.batches.records import CreateBatchRequest
from onward.errors import InvalidRequest, RateLimited
from onward.random_source import SEED_BITS
from onward.web.auth.api_key_table import Caller
from onward.web.json_body import field_error, short_repr

MAX_FILE_BYTES = 200_000_000
"""As in OpenAI's API."""
MAX_REQUESTS = 50_000
MAX_FILES = 1_000
MAX_BATCHES = 100
"""Batches of a caller that have not ended."""
MAX_KEPT_BATCHES = 2_000
MAX_UPLOADS = 4
"""Uploads of a caller at the same time, per process."""
MAX_REQUESTS_AT_ONCE = 64
"""Requests of all callers' batches at the same time."""
BATCH_PRIORITY = 1_000
"""The best priority of a request in a batch. Requests of clients have 0 unless they ask for another."""
MIN_EXPIRY_S, MAX_EXPIRY_S = 3_600, 2_592_000
COMPLETION_WINDOW_S = 86_400.0
"""The length of `24h`, the only window."""
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
SEEDED_ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/generate"})
"""Endpoints whose requests have the field `seed`."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What the flags set."""

    max_bytes: int
    """Bytes of all files of a caller."""
    concurrency: int
    ttl_s: float


def check_request(request: CreateBatchRequest) -> None:
    if request.output_expires_after is not None:
        check_expiry(request.output_expires_after.seconds, "output_expires_after.seconds")
    metadata = request.metadata or {}
    if len(metadata) > MAX_METADATA:
        raise field_error("metadata", f"has {len(metadata)} pairs, more than {MAX_METADATA}")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            limits = f"a key of {MAX_METADATA_KEY} and a value of {MAX_METADATA_VALUE} characters"
            raise field_error("metadata", f"{short_repr(key)}: longer than {limits}")


def check_expiry(seconds: int, param: str) -> None:
    if not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise field_error(param, f"must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}, got {seconds}")


def check_file_quota(num_files: int, num_bytes: int, added_bytes: int, limits: BatchLimits) -> None:
    """Raises `InvalidRequest` if a caller with these files may not have another one."""
    if num_files >= MAX_FILES:
        raise InvalidRequest(
            f"file: you have {num_files} files, as many as you may; delete some", code="quota_exceeded"
        )
    if num_bytes + added_bytes > limits.max_bytes:
        problem = f"your files would have more than {limits.max_bytes} bytes; delete some"
        raise InvalidRequest(f"file: {problem}", param="file", code="quota_exceeded")


def check_batch_quota(num_unfinished: int, num_kept: int) -> None:
    if num_unfinished >= MAX_BATCHES:
        problem = f"{num_unfinished} of your batches have not ended, as many as may; wait, or cancel some"
        raise RateLimited(problem, retry_after_s=60.0)
    if num_kept >= MAX_KEPT_BATCHES:
        raise RateLimited(f"{num_kept} of your batches are kept, as many as may", retry_after_s=3_600.0)


def caller_of_batches(caller: Caller) -> Caller:
    """Returns the caller as whom its batches run: with the same limits, but a low priority."""
    return replace(caller, priority=max(caller.priority or 0, BATCH_PRIORITY))


def concurrency_of(caller: Caller, limits: BatchLimits) -> int:
    """Returns how many requests of a caller's batches run at once. At most half of what its key allows, so that batches
    do not lock out the caller's other requests."""
    if caller.max_in_flight is None:
        return limits.concurrency
    return max(1, min(limits.concurrency, caller.max_in_flight // 2))


def find_problem(request: BatchRequest, endpoint: str) -> str | None:
    """Returns why this request may not be in a batch for `endpoint`, or None."""
    if request.url != endpoint:
        return f"url: must be {endpoint}, the endpoint of the batch, got {request.url[:80]!r}"
    if bytes(request.body.get("background", b"null")) not in (b"false", b"null"):
        return "body.background: must not be true: the batch waits for each response"
    return None


def seed_of(batch_seed: int, custom_id: str) -> int:
    """Returns the seed of a request that has none. It is the same however often the request is sent."""
    digest = hashlib.blake2b(f"{batch_seed};{custom_id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)


def with_seed(request: BatchRequest, batch_seed: int) -> BatchRequest:
    if request.url not in SEEDED_ENDPOINTS or not _lacks(request.body, "seed"):
        return request
    seed = msgspec.Raw(str(seed_of(batch_seed, request.custom_id)).encode())
    return msgspec.structs.replace(request, body={**request.body, "seed": seed})


def _lacks(body: Mapping[str, msgspec.Raw], name: str) -> bool:
    return bytes(body.get(name, b"null")) == b"null"
