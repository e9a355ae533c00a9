"""All targets, by name."""

from tests.fuzz import batch_targets, file_targets, page_targets, peer_targets, request_targets
from tests.fuzz.case import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for part in (request_targets, batch_targets, page_targets, file_targets, peer_targets)
    for target in part.TARGETS
}
