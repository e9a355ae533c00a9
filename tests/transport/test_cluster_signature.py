"""A peer proves that it has the cluster's key; a peer that only claims it is refused."""

import pytest

from onward.transport.cluster_signature import MAX_AGE_S, sign_request, verify_signature

KEY, PATH, BODY, NOW_S = "ab" * 32, "/attempt", b"{}", 1_800_000_000.5


def test_a_proof_is_for_one_method_one_path_one_body_and_a_minute() -> None:
    proof = sign_request(KEY, "POST", PATH, BODY, NOW_S)
    assert verify_signature(KEY, proof, "POST", PATH, BODY, NOW_S + MAX_AGE_S - 1)
    assert not verify_signature(KEY, proof, "POST", PATH, BODY, NOW_S + MAX_AGE_S + 1)
    assert not verify_signature(KEY, proof, "POST", PATH, BODY, NOW_S - MAX_AGE_S - 1)
    for method in ("GET", "DELETE", "post", ""):
        assert not verify_signature(KEY, proof, method, PATH, BODY, NOW_S)
    assert not verify_signature(KEY, proof, "POST", "/other", BODY, NOW_S)
    assert not verify_signature(KEY, proof, "POST", PATH, b"{ }", NOW_S)
    assert not verify_signature("cd" * 32, proof, "POST", PATH, BODY, NOW_S)


@pytest.mark.parametrize(
    "header", [None, "", ":", "1800000000", "-5:aa", "1800000000:ü", "²:aa", "1_8:aa", "9" * 5000 + ":"]
)
def test_what_is_no_proof_proves_nothing_and_raises_nothing(header: str | None) -> None:
    """Anybody can send it: `²`, which is a digit to some, was an internal error."""
    assert not verify_signature(KEY, header, "POST", PATH, BODY, NOW_S)
