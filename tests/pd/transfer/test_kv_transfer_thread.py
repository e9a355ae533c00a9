"""Two data planes with real sockets and real memory: what is pushed arrives, and what is not stays as it was."""

import secrets
from collections.abc import Callable

import numpy as np
import pytest

from onward.proto.kv_transfer import (
    EndLease,
    KvEndpoint,
    LeaseQuiesced,
    PushComplete,
    PushFailed,
    PushQuiesced,
    RevokeLease,
    StopPush,
    WriterLost,
    WritesComplete,
)
from tests.pd.transfer.instance import LAYOUT, PAGE_BYTES, Instance, wait_until

Start = Callable[..., Instance]
each = pytest.mark.parametrize("backend", ["shm", "tcp", "nixl"])


@each
@pytest.mark.parametrize("seed", range(3))
def test_random_block_maps_arrive_whole_and_touch_nothing_else(start: Start, backend: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ours, theirs = start(seed=1), start(backend, num_blocks=60, seed=2)
    count = int(rng.integers(1, 30))
    sources, targets = (rng.permutation(n)[:count].tolist() for n in (40, 60))
    sources[: count // 2] = sorted(sources[: count // 2])
    untouched = {block: theirs.block(block) for block in range(60) if block not in targets}
    theirs.expect(targets)
    ours.push(theirs.endpoint, targets)
    cut = count // 3
    ours.feed(sources[:cut])
    ours.feed(sources[cut:], first=cut)
    sent, counted = ours.hear(PushComplete), theirs.hear(WritesComplete)
    for source, target in zip(sources, targets, strict=True):
        np.testing.assert_array_equal(ours.block(source), theirs.block(target))
    for block, before in untouched.items():
        np.testing.assert_array_equal(theirs.block(block), before)
    assert sent.checksums == counted.checksums == ours.checksums(sources) == theirs.checksums(targets)
    assert sent.num_bytes == counted.num_bytes == count * 3 * PAGE_BYTES


@each
def test_a_block_of_several_batches_arrives(start: Start, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.pd.transfer.push_job.MAX_BATCH_PAGES", 2)
    ours, theirs = start(seed=1), start(backend, seed=2)
    theirs.expect(list(range(40)))
    ours.push(theirs.endpoint, range(40))
    ours.feed(list(range(40)))
    assert ours.hear(PushComplete).checksums == theirs.hear(WritesComplete).checksums == ours.checksums(range(40))
    np.testing.assert_array_equal(ours.bytes, theirs.bytes)


@each
def test_checksums_are_computed_only_where_they_are_asked_for(start: Start, backend: str) -> None:
    ours, theirs = start(), start(backend, seed=2)
    theirs.expect([4], checksums=False)
    ours.push(theirs.endpoint, [4], checksums=False)
    ours.feed([9])
    assert ours.hear(PushComplete).checksums == [] == theirs.hear(WritesComplete).checksums
    np.testing.assert_array_equal(ours.block(9), theirs.block(4))


@each
def test_a_lease_of_no_blocks_is_complete_at_once(start: Start, backend: str) -> None:
    ours, theirs = start(), start(backend)
    theirs.expect([])
    ours.push(theirs.endpoint, [], first_block=3)
    assert ours.hear(PushComplete).num_bytes == 0 == theirs.hear(WritesComplete).num_bytes


@each
def test_layers_arrive_while_later_ones_are_computed(start: Start, backend: str) -> None:
    ours, theirs = start(seed=1), start(backend, seed=2)
    theirs.expect([7, 3])
    ours.push(theirs.endpoint, [7, 3])
    ours.num_layers_done = 30
    ours.feed([5, 6], before=30)
    for layer in range(3):
        later = theirs.block(7)[layer + 1 :]
        ours.num_layers_done = 30 + layer + 1
        wait_until(lambda: bool((theirs.block(7)[: layer + 1] == ours.block(5)[: layer + 1]).all()))  # noqa: B023
        np.testing.assert_array_equal(theirs.block(7)[layer + 1 :], later)
    assert ours.hear(PushComplete).checksums == theirs.hear(WritesComplete).checksums


@each
def test_one_connection_serves_many_leases_at_once(start: Start, backend: str) -> None:
    ours, theirs = start(seed=1), start(backend, seed=2)
    for n in range(10):
        theirs.expect([n, n + 10], f"lease {n}")
        ours.push(theirs.endpoint, [n, n + 10], f"lease {n}")
    for n in reversed(range(10)):
        ours.feed([30 - n, n], f"lease {n}")
    for n in range(10):
        assert ours.hear(PushComplete, f"lease {n}").checksums == theirs.hear(WritesComplete, f"lease {n}").checksums
        theirs.tell(EndLease(f"lease {n}"))
    assert ours.plane.num_connections == theirs.plane.num_connections == 1


@each
def test_a_revoked_lease_lets_nothing_more_in_and_its_push_fails(start: Start, backend: str) -> None:
    ours, theirs = start(seed=1), start(backend, seed=2)
    theirs.expect([0, 1])
    ours.push(theirs.endpoint, [0, 1])
    ours.feed([8])
    wait_until(lambda: bool((theirs.block(0) == ours.block(8)).all()))
    theirs.tell(RevokeLease("lease"))
    theirs.hear(LeaseQuiesced)
    before = theirs.bytes.copy()
    ours.feed([9], first=1)
    assert "revoked" in ours.hear(PushFailed).message
    _transfer(ours, theirs, [20], [30], "another")
    before.reshape(3, 40, -1)[:, 30] = ours.block(20)
    np.testing.assert_array_equal(theirs.bytes, before)


@each
def test_a_lease_that_nobody_has_joined_is_quiet_at_once_and_a_late_writer_is_refused(
    start: Start, backend: str
) -> None:
    ours, theirs = start(seed=1), start(backend, seed=2)
    before = theirs.bytes.copy()
    theirs.expect([0])
    theirs.tell(RevokeLease("lease"))
    theirs.hear(LeaseQuiesced)
    theirs.tell(RevokeLease("lease"))
    theirs.hear(LeaseQuiesced)
    ours.push(theirs.endpoint, [0])
    ours.feed([8])
    assert "it was revoked" in ours.hear(PushFailed).message
    np.testing.assert_array_equal(theirs.bytes, before)


@each
def test_unknown_and_ended_leases_and_other_blocks_are_refused(start: Start, backend: str) -> None:
    ours, theirs = start(seed=1), start(backend, seed=2)
    before = theirs.bytes.copy()
    theirs.expect([5], "other blocks")
    theirs.expect([6], "ended")
    theirs.tell(EndLease("ended"))
    for lease, why in [("unknown", "no such lease"), ("other blocks", "other blocks"), ("ended", "it has ended")]:
        ours.push(theirs.endpoint, [6], lease)
        ours.feed([1], lease)
        assert why in ours.hear(PushFailed, lease).message
    np.testing.assert_array_equal(theirs.bytes, before)


def test_an_unknown_lease_is_quiet_at_once(start: Start) -> None:
    theirs = start("shm")
    theirs.tell(RevokeLease("lease"))
    theirs.hear(LeaseQuiesced)


@each
def test_a_stopped_push_is_quiet_and_its_lease_loses_its_writer(start: Start, backend: str) -> None:
    ours, theirs = start(seed=1), start(backend, seed=2)
    theirs.expect([0, 1])
    ours.push(theirs.endpoint, [0, 1])
    ours.feed([8])
    wait_until(lambda: bool((theirs.block(0) == ours.block(8)).all()))
    ours.tell(StopPush("lease"))
    ours.hear(PushQuiesced)
    assert "gave up" in theirs.hear(WriterLost).message
    before = theirs.bytes.copy()
    ours.feed([9], first=1)
    theirs.tell(RevokeLease("lease"))
    theirs.hear(LeaseQuiesced)
    np.testing.assert_array_equal(theirs.bytes, before)
    ours.tell(StopPush("lease"))
    ours.hear(PushQuiesced)


def test_a_stop_that_overtakes_its_push_still_wins(start: Start) -> None:
    ours, theirs = start(seed=1), start("shm", seed=2)
    before = theirs.bytes.copy()
    theirs.expect([0])
    theirs.expect([1], "later")
    ours.tell(StopPush("lease"))
    ours.hear(PushQuiesced)
    ours.push(theirs.endpoint, [0])
    ours.feed([8])
    _transfer(ours, theirs, [9], [1], "later", is_expected=True)
    before.reshape(3, 40, -1)[:, 1] = ours.block(9)
    np.testing.assert_array_equal(theirs.bytes, before)


def test_a_lease_that_is_pushed_to_a_second_time_fails(start: Start) -> None:
    ours, theirs = start(seed=1), start("shm", seed=2)
    theirs.expect([0, 1])
    ours.push(theirs.endpoint, [0, 1])
    ours.push(theirs.endpoint, [0, 1])
    assert "second time" in ours.hear(PushFailed).message


@each
def test_a_corrupted_byte_shows_in_the_checksums(start: Start, backend: str) -> None:
    ours, theirs = start(seed=1), start(backend, seed=2)
    theirs.expect([0, 1])
    ours.push(theirs.endpoint, [0, 1])
    ours.feed([8])
    wait_until(lambda: bool((theirs.block(0) == ours.block(8)).all()))
    theirs.bytes[theirs.geometry.page_offset(2, 0) + 17] ^= 1
    ours.feed([9], first=1)
    sent, counted = ours.hear(PushComplete), theirs.hear(WritesComplete)
    assert sent.checksums[0] != counted.checksums[0]
    assert sent.checksums[1] == counted.checksums[1]


@each
def test_the_end_of_the_receiver_fails_the_push(start: Start, backend: str) -> None:
    ours, theirs = start(), start(backend)
    theirs.expect([0, 1])
    ours.push(theirs.endpoint, [0, 1])
    ours.feed([8])
    wait_until(lambda: bool((theirs.block(0) == ours.block(8)).all()))
    theirs.plane.close()
    assert "connection" in ours.hear(PushFailed).message
    ours.push(theirs.endpoint, [0, 1], "again")
    assert "cannot be reached" in ours.hear(PushFailed, "again").message


@each
def test_the_end_of_the_writer_is_noticed(start: Start, backend: str) -> None:
    ours, theirs = start(), start(backend)
    theirs.expect([0, 1])
    ours.push(theirs.endpoint, [0, 1])
    ours.feed([8])
    wait_until(lambda: bool((theirs.block(0) == ours.block(8)).all()))
    ours.plane.close()
    assert "closed the connection" in theirs.hear(WriterLost).message
    theirs.tell(RevokeLease("lease"))
    theirs.hear(LeaseQuiesced)


@each
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"key": secrets.token_hex(32)}, "does not hold this cluster's key"),
        ({"key": ""}, "does not hold this cluster's key"),
        ({"layout": LAYOUT.__class__("other", "int8", 16, 3, 2, 32)}, "laid out as"),
    ],
)
def test_a_writer_that_does_not_belong_is_refused(start: Start, backend: str, wrong: dict, why: str) -> None:
    theirs = start(backend, key="ab" * 32)
    ours = start(**({"key": "ab" * 32} | wrong))
    theirs.expect([0])
    ours.push(theirs.endpoint, [0])
    ours.feed([0])
    assert why in ours.hear(PushFailed).message


@each
def test_a_writer_that_means_another_incarnation_is_refused(start: Start, backend: str) -> None:
    ours, theirs = start(), start(backend)
    theirs.expect([0])
    ours.push(KvEndpoint(backend, theirs.endpoint.address, "an earlier one"), [0])
    assert "means worker an earlier one" in ours.hear(PushFailed).message


@pytest.mark.parametrize("address", ["tcp:192.0.2.7:80", "tcp:example.org:80", "tcp:127.0.0.1", "unix:name", "what"])
def test_an_address_that_is_none_or_not_safe_fails_the_push(start: Start, address: str) -> None:
    ours = start()
    ours.push(KvEndpoint("tcp", address, "worker"), [0])
    assert address in ours.hear(PushFailed).message


def _transfer(
    ours: Instance, theirs: Instance, sources: list[int], targets: list[int], lease: str, *, is_expected: bool = False
) -> None:
    """Whole, and so a proof that all that was said before has been heard."""
    if not is_expected:
        theirs.expect(targets, lease)
    ours.push(theirs.endpoint, targets, lease)
    ours.feed(sources, lease)
    ours.hear(PushComplete, lease)
    theirs.hear(WritesComplete, lease)
