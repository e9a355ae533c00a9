"""All targets, by name."""

from tests.fuzz import file_targets, peer_targets, request_targets
from tests.fuzz.case import Target

TARGETS: dict[str, Target] = {
    target.name: target for target in (*request_targets.TARGETS, *file_targets.TARGETS, *peer_targets.TARGETS)
}
