"""The short form of `make chaos`: each of these faults once, under load, and the router killed a few times."""

import pytest

from tests.e2e.chaos import ROUTER_FLAGS, Chaos, Plan
from tests.e2e.cluster import Cluster, Fault

DECODE_FAULTS = (
    Fault("kill", "worker"),
    Fault("kill", "engine"),
    Fault("kill", "api"),
    Fault("kill", "instance"),
    Fault("stop", "instance"),
    Fault("drain", "instance"),
)
PREFILL_FAULTS = (
    Fault("kill", "worker"),
    Fault("kill", "instance"),
    Fault("stop", "engine"),
    Fault("leave", "instance"),
)
PLAN = Plan(
    seconds=0,
    router_seconds=5,
    max_tokens=40,
    seed=5,
    roles={"prefill": PREFILL_FAULTS, "decode": DECODE_FAULTS},
)


@pytest.mark.timeout(600)  # many processes, and perhaps little of a machine
def test_every_answer_under_faults_equals_the_undisturbed_one() -> None:
    with Cluster(router=ROUTER_FLAGS) as cluster:
        report = Chaos(cluster, PLAN, print).run()
    assert not report.wrong
    assert report.faults.keys() == PLAN.wanted(), "each kind of fault has happened"
    assert sum(report.requests.values()) >= PLAN.num_clients
    assert sum(report.resumes.values()) >= 1, "streams were resumed"
    assert report.router_kills >= 1
    assert report.returns >= 1, "clients came back"
