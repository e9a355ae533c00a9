"""Whatever the network and the instances do: a clean end on both sides, and never two writers on a block."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from onward.pd.decode_handoff_protocol import DecodeHandoffProtocol
from onward.pd.handoff_events import GrantReceived, HandoffCancelled, HandoffFailed, OfferReceived, PrefillRequested
from onward.pd.handoff_timeouts import HandoffTimeouts
from onward.pd.prefill_handoff_protocol import PrefillHandoffProtocol
from onward.proto.handoff import ToDecode, ToPrefill
from tests.pd.messages import grant, prefill
from tests.pd.world import CALM, TIMES, Weather, World

SEEDS = st.integers(0, 2**32 - 1)
DRIFTS = st.sampled_from([0.0, 0.03])
"""Two clocks then differ by six per cent at most; the margin is twenty."""

WEATHERS = st.builds(
    Weather,
    loss=st.sampled_from([0.0, 0.1, 0.5]),
    doubling=st.sampled_from([0.0, 0.3]),
    max_delay_s=st.sampled_from([0.0, 0.2, 2.5]),
    restart=st.sampled_from([0.0, 0.01, 0.05]),
    pause=st.sampled_from([0.0, 0.01]),
    renewal=st.sampled_from([0.0, 0.02]),
    whim=st.sampled_from([0.0, 0.01]),
    damage=st.sampled_from([0.0, 0.05]),
    hesitation=st.sampled_from([0.0, 0.3, 0.8]),
)

STORM = Weather(
    loss=0.2,
    doubling=0.3,
    max_delay_s=1.0,
    restart=0.01,
    pause=0.01,
    renewal=0.01,
    whim=0.01,
    damage=0.05,
    hesitation=0.6,
)

LONG_ENOUGH_S = 2 * TIMES.lease_s + TIMES.handoff_timeout_s + 3
"""Pauses and messages under way come to their end, then every wait does."""


def survive(world: World, weather: Weather) -> None:
    world.run(weather, 4.0, ask=0.2)
    world.run(CALM, LONG_ENOUGH_S)
    world.check_nothing_is_left()


@settings(max_examples=500, deadline=None)
@given(SEEDS, st.integers(1, 2), DRIFTS, WEATHERS)
def test_every_handoff_ends_once_and_cleanly_on_both_sides(
    seed: int, num_prefills: int, drift: float, weather: Weather
) -> None:
    survive(World(seed, num_prefills, drift), weather)


@settings(max_examples=150, deadline=None)
@given(SEEDS, WEATHERS)
def test_when_the_faults_are_over_handoffs_arrive_again(seed: int, weather: Weather) -> None:
    world = World(seed, 2, 0.03)
    survive(world, weather)
    arrived = world.seen["KvArrived"]
    for address in world.prefills:
        world.decode.ask(address)
    world.run(CALM, 2.0)
    assert world.seen["KvArrived"] == arrived + 2


@settings(max_examples=150, deadline=None)
@given(SEEDS, st.floats(0.0, 0.1), st.floats(0.0, 0.2))
def test_lost_and_late_messages_alone_cost_time_and_no_handoff(seed: int, loss: float, delay_s: float) -> None:
    """Below what a lease bridges."""
    world = World(seed, 1, 0.03)
    for _ in range(3):
        world.decode.ask("p0")
        world.run(Weather(loss=loss, doubling=0.3, max_delay_s=delay_s), 3.0)
    world.run(CALM, LONG_ENOUGH_S)
    world.check_nothing_is_left()
    assert world.seen["KvArrived"] == 3


def test_every_fault_and_every_kind_of_end_was_really_there() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        world = World(seed, 2, 0.03)
        survive(world, STORM)
        seen += world.seen
    faults = ["lost", "doubled", "paused", "prefill restarted", "decode restarted"]
    ends = ["KvArrived", "HandoffCompleted", "HandoffCancelled", "pd_transfer_failed", "pd_prefill_failed"]
    ends += ["pd_lease_expired", "pd_no_decode_blocks"]
    assert [name for name in faults + ends if seen[name] < 5] == []


@settings(max_examples=300, deadline=None)
@given(
    st.floats(0.5, 20.0),
    st.floats(0.95, 1.05),
    st.floats(0.95, 1.05),
    st.integers(20, 150),
    st.integers(0, 40),
    st.integers(0, 10),
    st.sampled_from([0.0, 0.5]),
    SEEDS,
)
def test_a_writer_that_is_cut_off_stops_before_its_blocks_are_given_up(
    lease_s: float, rate_p: float, rate_d: float, cut_at: int, delay_to_p: int, delay_to_d: int, loss: float, seed: int
) -> None:
    """Time goes in fiftieths of a lease. What is said from `cut_at` on does not come through."""
    random = Random(seed)
    offset_s = random.uniform(0, 1e6)
    times = HandoffTimeouts(lease_s, lease_s, 1000 * lease_s)
    p, d = PrefillHandoffProtocol("P1", times), DecodeHandoffProtocol("D1", times)
    d.request_prefill("p", prefill(d.next_handoff_id()), offset_s)
    under_way: list[tuple[int, Callable[[float, float], None]]] = []
    seen: dict[type, int] = {}
    for tick in range(400):
        now_p, now_d = tick * lease_s / 50 * rate_p, offset_s + tick * lease_s / 50 * rate_d
        for at, deliver in under_way:
            if at == tick:
                deliver(now_p, now_d)
        p.tick(now_p)
        d.tick(now_d)
        for event in [*p.take_events(), *d.take_events()]:
            seen.setdefault(type(event), tick)
            if isinstance(event, PrefillRequested):
                p.offer(event.key, 2, now_p)
            if isinstance(event, OfferReceived):
                d.grant(grant(event.handoff_id, lease_s=lease_s), now_d)
        to_p = [(tick + 1 + delay_to_p, partial(_deliver_to_prefill, p, message)) for _, message in d.take_messages()]
        to_d = [(tick + 1 + delay_to_d, partial(_deliver_to_decode, d, message)) for _, message in p.take_messages()]
        if tick < cut_at:
            under_way += [item for item in [*to_p, *to_d] if random.random() >= loss]
    assert not any([*p.count_by_state().values(), *d.count_by_state().values()])
    if GrantReceived in seen:
        assert seen[HandoffCancelled] <= seen[HandoffFailed]


def _deliver_to_prefill(side: PrefillHandoffProtocol, message: ToPrefill, now_p: float, now_d: float) -> None:
    side.receive("D1", message, now_p)


def _deliver_to_decode(side: DecodeHandoffProtocol, message: ToDecode, now_p: float, now_d: float) -> None:
    side.receive("p", message, now_d)
