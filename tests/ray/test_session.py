import pytest

from onward.ray.member_actor import node_name
from onward.ray.session import HEALTH_CHECKS, health_checks


@pytest.mark.parametrize("timeout_s", [0.4, 2.0, 30.0])
def test_a_node_is_given_up_within_the_given_time(timeout_s: float) -> None:
    """The first failed check begins at most a period after the loss, and each takes its whole time."""
    told = health_checks(timeout_s)
    longest_ms = told["health_check_period_ms"] + HEALTH_CHECKS * told["health_check_timeout_ms"]
    assert longest_ms <= 1000 * timeout_s
    assert told["health_check_failure_threshold"] == HEALTH_CHECKS


def test_nodes_of_one_address_have_different_names() -> None:
    assert node_name("10.0.0.1", "0123456789") == "10.0.0.1-01234567"
    assert node_name("fd00::1", "abcdefghij") == "fd00..1-abcdefgh"
