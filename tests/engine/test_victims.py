"""Which requests are preempted for the room that another one needs: as few as will do, and none if all would not do."""

from onward.engine.request import RequestStatus
from tests.engine.harness import Client, Harness
from tests.engine.pd_cluster import Cluster


def fill(harness: Harness) -> None:
    """As many steps in flight as there may be."""
    while harness.plan() is not None:
        harness.check()


def not_enough_room() -> tuple[Harness, Client, Client]:
    """`high` needs 14 of 20 blocks. It may not preempt `equal`, which holds 8, and those of `low` are not enough."""
    harness = Harness(num_blocks=20, max_num_seqs=4)
    equal = harness.submit("equal", [1] * 29, max_tokens=15)
    harness.submit("low", [2] * 17, max_tokens=19, priority=3)
    fill(harness)
    harness.answer()
    fill(harness)
    high = harness.submit("high", list(range(1, 54)), max_tokens=3)
    return harness, equal, high


def test_nobody_is_preempted_if_all_victims_together_do_not_make_enough_room() -> None:
    harness, equal, high = not_enough_room()
    while equal.finish_reason is None:
        fill(harness)
        assert not any(plan.preempt for plan in harness.all_plans)
        harness.answer()
    harness.run_until_idle()
    assert high.tokens == harness.expected(high)
    harness.check_all_exact()


def test_victims_are_preempted_as_soon_as_they_make_enough_room() -> None:
    harness, _, high = not_enough_room()
    while high.finish_reason is None:
        fill(harness)
        harness.answer()
    assert harness.metric("preemptions") == 1
    assert harness.clients["low"].finish_reason is None
    harness.run_until_idle()
    harness.check_all_exact()


def test_a_victim_whose_blocks_turn_out_not_to_be_needed_is_spared() -> None:
    """The latest arrival is looked at first; the large one beside it makes enough room without it."""
    harness = Harness(num_blocks=20, max_num_seqs=4, max_num_batched_tokens=64)
    harness.submit("large", [1] * 33, max_tokens=20, priority=3)
    harness.submit("small", [2] * 5, max_tokens=20, priority=3)
    fill(harness)
    harness.answer()
    fill(harness)
    harness.submit("high", [3] * 45, max_tokens=3)
    harness.answer()
    fill(harness)
    statuses = {name: harness.core._live[name].status for name in ("large", "small")}
    assert statuses == {"large": RequestStatus.PREEMPTING, "small": RequestStatus.RUNNING}
    harness.run_until_idle()
    harness.check_all_exact()


def test_a_victim_s_block_to_grow_into_counts_as_room() -> None:
    """Each running request keeps one block to grow into. A preempted one needs none, so one victim is enough here."""
    harness = Harness(num_blocks=12, max_num_seqs=4, max_num_batched_tokens=64)
    for name in ("first", "second"):
        harness.submit(name, [len(name)] * 13, max_tokens=3, priority=3)
    fill(harness)
    harness.submit("high", [3] * 25, max_tokens=3)
    fill(harness)
    harness.answer()
    fill(harness)
    assert [r.request_id for r in harness.core.scheduler.preempting] == ["second"]
    harness.run_until_idle()
    assert harness.metric("preemptions") == 1
    harness.check_all_exact()


def test_blocks_that_the_needer_would_share_do_not_count_as_room() -> None:
    """`low` holds the prefix that `high` shares. Preempting `low` frees nothing that `high` could take beside it."""
    harness = Harness(num_blocks=14, max_num_seqs=4, max_num_batched_tokens=64)
    prefix = list(range(1, 17))
    harness.submit("equal", [50] * 17, max_tokens=6)
    harness.submit("low", [*prefix, 40], max_tokens=8, priority=3)
    fill(harness)
    harness.answer()
    fill(harness)
    harness.submit("high", [*prefix, *range(20, 37)], max_tokens=3)
    assert not harness.core.scheduler.allocator.can_allocate(harness.core._live["high"])
    harness.run_until_idle()
    assert harness.metric("preemptions") == 0, "the blocks of `equal` were waited for"
    harness.check_all_exact()


def test_nobody_is_preempted_for_a_request_that_an_earlier_one_keeps_from_the_blocks() -> None:
    """A decode instance: the blocks of `low` would do for `own`, but not beside `earlier`, which waits for a peer's KV."""
    cluster = Cluster(num_blocks=20, local_prefill_tokens=44)
    decode = cluster.decode
    cluster.submit("equal", [1] * 17, max_tokens=6)
    cluster.submit("low", [2] * 13, max_tokens=12, priority=3)
    for _ in range(2):
        cluster.turn()
    cluster.submit("earlier", [3] * 60, max_tokens=2)
    fill(decode)
    for _ in range(20):
        cluster.turn(steps=False)
        for peer in cluster.peers.values():
            peer.plan()
    scheduler = decode.core.scheduler
    assert scheduler.leases.first_short_of_blocks is decode.core._live["earlier"]
    cluster.submit("own", [4] * 40, max_tokens=2)
    fill(decode)
    assert decode.core._live["own"].status is RequestStatus.WAITING
    assert not decode.all_plans[-1].preempt
    decode.answer()
    assert decode.plan() is not None
    assert not any(plan.preempt for plan in decode.all_plans)
    cluster.settle(2.0)
    decode.check_all_exact()


def test_nobody_is_preempted_for_a_request_that_an_earlier_one_keeps_from_the_slot() -> None:
    """A decode instance: `low` has one slot, which `earlier` gets first; its offer has expired."""
    cluster = Cluster(max_num_seqs=2, num_blocks=64, local_prefill_tokens=20, offer_hold_s=0.2)
    decode = cluster.decode
    cluster.submit("equal", [1] * 17, max_tokens=20)
    cluster.submit("low", [2] * 13, max_tokens=20, priority=3)
    for _ in range(2):
        cluster.turn()
    cluster.submit("earlier", [3] * 40, max_tokens=2)
    fill(decode)
    for _ in range(20):
        cluster.turn(steps=False)
        cluster.pass_time(0.05)
        for peer in cluster.peers.values():
            peer.plan()
    scheduler = decode.core.scheduler
    assert (
        scheduler.leases.first_short_of_blocks is decode.core._live["earlier"] and not scheduler.leases.awaiting_blocks
    )
    cluster.submit("own", [4] * 9, max_tokens=2)
    decode.answer()
    assert decode.plan() is not None
    assert decode.core._live["own"].status is RequestStatus.WAITING
    assert not any(plan.preempt for plan in decode.all_plans)
    cluster.settle(2.0)
    decode.check_all_exact()
