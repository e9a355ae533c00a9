"""Deliberate bugs in HTTP: connections, and which requests are believed. See `tests/sabotage.py`."""

from onward.transport import proof
from tests.sabotage_kinds import Patches, Sabotage

CALLERS = "tests/web/test_callers.py::"


def _a_proof_is_for_any_method(patch: Patches) -> None:
    original = proof._mac
    patch.put(proof, "_mac", lambda key, stamp, method, path, body: original(key, stamp, "ANY", path, body))


TABLE = [
    Sabotage(
        "proof-of-any-method",
        "a proof that was made for a GET is good for a DELETE",
        _a_proof_is_for_any_method,
        [
            "tests/transport/test_proof.py::test_a_proof_is_for_one_method_one_path_one_body_and_a_minute",
            CALLERS + "test_a_proof_of_the_clusters_key_is_as_good_as_an_admins",
        ],
    ),
]
