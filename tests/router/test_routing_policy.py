"""The selected instance: the rules of all policies, and what each policy promises."""

from collections import Counter
from dataclasses import replace
from random import Random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.config import RoutingPolicy
from onward.proto.kv_events import KvEvents
from onward.proto.router import InstanceLoad
from onward.router import routing_policy
from onward.router.instance_registry import InstanceInfo, InstanceState
from onward.router.prefix_index import PrefixIndex
from onward.router.routing_policy import (
    MAX_PREFILL_PEERS,
    PREFIX_WEIGHT,
    InstanceSelector,
    RandBelow,
    RoutingCriteria,
    relative_load,
)
from tests.router.members import A_REPLICA

POLICIES: tuple[RoutingPolicy, ...] = get_args(RoutingPolicy)
NOW_S = 100.0
BROKEN = NOW_S + 1
PROMPT = [bytes([number]) for number in range(10)]


def replica(instance: str, **changes: object) -> InstanceInfo:
    return replace(A_REPLICA, instance_id=instance, url=f"http://{instance}", **changes)


def prefiller(instance: str, **changes: object) -> InstanceInfo:
    return replica(instance, **{"role": "prefill", "handoff_address": f"tcp://{instance}:1", **changes})


def busy(running: int, **changes: int) -> InstanceLoad:
    return InstanceLoad(**{"running": running, "max_running": 10, "num_blocks": 100, "free_blocks": 100, **changes})


def chooser(name: RoutingPolicy = "least_loaded", index: PrefixIndex | None = None, seed: int = 0) -> InstanceSelector:
    return InstanceSelector(name, None, None, Random(seed).randrange, index)


def chosen(facts: RoutingCriteria, *replicas: InstanceInfo) -> str | None:
    pair = chooser().select(facts, replicas, NOW_S)
    return pair.instance.instance_id if pair else None


def prefills(facts: RoutingCriteria, *replicas: InstanceInfo) -> list[str]:
    pair = chooser().select(facts, replicas, NOW_S)
    assert pair is not None
    return [peer.instance_id for peer in pair.prefill_peers]


def _told(*numbers: int) -> RandBelow:
    left = list(numbers)
    return lambda below: left.pop(0)


names = st.sampled_from("abcdefgh")
loads = st.builds(
    InstanceLoad,
    running=st.integers(0, 20),
    waiting=st.integers(0, 20),
    max_running=st.integers(0, 10),
    free_blocks=st.integers(0, 100),
    num_blocks=st.integers(0, 100),
)
a_replica = st.builds(
    replica,
    names,
    role=st.sampled_from(["mixed", "decode", "prefill"]),
    state=st.sampled_from(InstanceState),
    fingerprint=st.sampled_from(["this", "that"]),
    handoff_address=st.sampled_from(["", "tcp://somewhere:1"]),
    max_tokens=st.sampled_from([0, 50, 100, 200]),
    load=loads,
    num_reserved=st.integers(0, 20),
    circuit_open_until_s=st.sampled_from([0.0, BROKEN]),
)
some_replicas = st.lists(a_replica, unique_by=lambda one: one.instance_id, max_size=8)
like_ones = st.lists(
    st.builds(replica, names, load=loads, num_reserved=st.integers(0, 20)),
    unique_by=lambda one: one.instance_id,
    min_size=1,
    max_size=8,
)
some_facts = st.builds(
    RoutingCriteria,
    num_prompt_tokens=st.sampled_from([None, 10, 60, 150]),
    max_output=st.sampled_from([None, 10, 60]),
    session=st.sampled_from(["", "a-session"]),
    prompt_hashes=st.sampled_from([[], [b"1", b"2"]]),
    avoided_instances=st.frozensets(names),
    excluded_instances=st.frozensets(names, max_size=2),
    fingerprint=st.sampled_from([None, "this"]),
)


class TestRules:
    @settings(max_examples=200, deadline=None)
    @given(st.sampled_from(POLICIES), some_facts, some_replicas, st.integers(0, 99))
    def test_whoever_is_chosen_is_allowed(
        self, name: RoutingPolicy, facts: RoutingCriteria, replicas: list[InstanceInfo], seed: int
    ) -> None:
        pair = chooser(name, PrefixIndex(), seed).select(facts, replicas, NOW_S)
        if pair is None:
            assert not any(routing_policy.can_take_request(one, facts) for one in replicas)
            return
        one = pair.instance
        assert one.role in ("mixed", "decode")
        assert one.state in (InstanceState.READY, InstanceState.RESTARTING, InstanceState.SUSPECT)
        assert one.instance_id not in facts.excluded_instances
        if one.max_tokens and facts.num_prompt_tokens is not None:
            assert facts.num_prompt_tokens + (facts.max_output or 0) <= one.max_tokens
        others = [other for other in replicas if routing_policy.can_take_request(other, facts)]
        healthy = [
            other
            for other in others
            if other.state is not InstanceState.SUSPECT and other.circuit_open_until_s <= NOW_S
        ]
        assert not healthy or one in healthy
        if any(other.instance_id not in facts.avoided_instances for other in healthy):
            assert one.instance_id not in facts.avoided_instances

    @settings(max_examples=200, deadline=None)
    @given(st.sampled_from(POLICIES), some_facts, some_replicas)
    def test_prompts_are_computed_only_by_those_who_can_hand_them_over(
        self, name: RoutingPolicy, facts: RoutingCriteria, replicas: list[InstanceInfo]
    ) -> None:
        pair = chooser(name, PrefixIndex()).select(facts, replicas, NOW_S)
        if pair is None or pair.instance.role == "mixed":
            assert pair is None or pair.prefill_peers == []
            return
        assert len(pair.prefill_peers) <= MAX_PREFILL_PEERS
        assert len({peer.instance_id for peer in pair.prefill_peers}) == len(pair.prefill_peers)
        for peer in pair.prefill_peers:
            assert peer.role != "decode"
            assert peer.handoff_address
            assert peer.state in (InstanceState.READY, InstanceState.RESTARTING, InstanceState.SUSPECT)
            assert peer.fingerprint == pair.instance.fingerprint
            assert peer.instance_id not in facts.excluded_instances

    def test_nobody_is_chosen_where_nobody_is(self) -> None:
        assert chosen(RoutingCriteria()) is None
        assert chosen(RoutingCriteria(), prefiller("a")) is None

    @pytest.mark.parametrize("state", [InstanceState.STARTING, InstanceState.DRAINING, InstanceState.GONE])
    def test_some_states_take_no_new_requests_even_if_there_is_nobody_else(self, state: InstanceState) -> None:
        assert chosen(RoutingCriteria(), replica("a", state=state)) is None

    @pytest.mark.parametrize(
        "worse",
        [{"state": InstanceState.RESTARTING}, {"state": InstanceState.SUSPECT}, {"circuit_open_until_s": BROKEN}],
    )
    def test_others_only_if_nobody_is_ready(self, worse: dict[str, object]) -> None:
        ready = replica("ready", load=busy(9, waiting=99))
        assert chosen(RoutingCriteria(), replica("a", **worse), ready) == "ready"
        assert chosen(RoutingCriteria(), replica("a", **worse)) == "a"

    def test_one_that_restarts_is_better_than_one_that_may_be_dead(self) -> None:
        restarting = replica("restarting", state=InstanceState.RESTARTING)
        assert chosen(RoutingCriteria(), replica("a", state=InstanceState.SUSPECT), restarting) == "restarting"

    def test_a_breaker_whose_pause_is_over_is_no_obstacle(self) -> None:
        assert chosen(RoutingCriteria(), replica("a", circuit_open_until_s=NOW_S), replica("b", load=busy(1))) == "a"

    def test_a_request_goes_only_where_it_fits(self) -> None:
        small, large = replica("small", max_tokens=100), replica("large", max_tokens=200, load=busy(9))
        assert chosen(RoutingCriteria(num_prompt_tokens=60, max_output=40), small, large) == "small"
        assert chosen(RoutingCriteria(num_prompt_tokens=60, max_output=41), small, large) == "large"
        assert chosen(RoutingCriteria(num_prompt_tokens=100), small, large) == "large"
        assert chosen(RoutingCriteria(num_prompt_tokens=200, max_output=1), small, large) is None

    def test_a_request_of_unknown_length_passes(self) -> None:
        assert chosen(RoutingCriteria(max_output=5000), replica("a")) == "a"
        assert chosen(RoutingCriteria(num_prompt_tokens=5000), replica("a", max_tokens=0)) == "a"

    def test_an_instance_to_avoid_is_still_taken_if_it_is_the_only_one(self) -> None:
        facts = RoutingCriteria(avoided_instances=frozenset("a"))
        assert chosen(facts, replica("a"), replica("b", load=busy(9))) == "b"
        assert chosen(facts, replica("a"), replica("b", state=InstanceState.SUSPECT)) == "a"
        assert chosen(facts, replica("a")) == "a"

    def test_an_instance_to_exclude_never_is(self) -> None:
        assert chosen(RoutingCriteria(excluded_instances=frozenset("a")), replica("a")) is None

    def test_a_resume_stays_exact_where_it_can(self) -> None:
        facts = RoutingCriteria(fingerprint="this")
        inexact = replica("inexact", fingerprint="that")
        assert chosen(facts, inexact, replica("exact", fingerprint="this", load=busy(9))) == "exact"
        assert chosen(facts, inexact) == "inexact"


class TestPairs:
    def test_a_decode_instance_is_paired_with_the_best_prefill_instances(self) -> None:
        peers = [prefiller(name, load=busy(load)) for name, load in (("p", 4), ("q", 1), ("r", 3), ("s", 2))]
        assert prefills(RoutingCriteria(), replica("d", role="decode"), *peers) == ["q", "s", "r"]

    def test_a_mixed_instance_with_a_handoff_address_stands_in(self) -> None:
        stand_in = replica("m", handoff_address="tcp://m:1", load=busy(9))
        assert prefills(RoutingCriteria(), replica("d", role="decode"), stand_in) == ["m"]

    def test_peers_that_cannot_pass_kv_are_not_paired(self) -> None:
        peers = [prefiller("p", fingerprint="other"), prefiller("q", block_size=32), prefiller("r", handoff_address="")]
        assert prefills(RoutingCriteria(), replica("d", role="decode"), *peers) == []

    def test_prefill_instances_of_another_model_are_not_paired(self) -> None:
        """Whatever their numerics are called: a name of the numerics does not say which weights."""
        peers = [prefiller("p", model="m-v2"), prefiller("q", model="m-v1")]
        assert prefills(RoutingCriteria(model="m-v1"), replica("d", role="decode", model="m-v1"), *peers) == ["q"]
        assert prefills(RoutingCriteria(), replica("d", role="decode", model="m-v1"), *peers) == ["q"]

    def test_an_instance_of_another_model_takes_no_request(self) -> None:
        assert chosen(RoutingCriteria(model="m-v1"), replica("a", model="m-v2")) is None
        assert chosen(RoutingCriteria(model="m-v1"), replica("a", model="m-v2"), replica("b", model="m-v1")) == "b"

    def test_a_decode_instance_is_chosen_although_it_must_prefill_by_itself(self) -> None:
        assert chosen(RoutingCriteria(), replica("d", role="decode")) == "d"

    def test_without_prefill_instances_mixed_ones_go_first(self) -> None:
        decode, mixed = replica("d", role="decode"), replica("m", load=busy(9))
        assert chosen(RoutingCriteria(), decode, mixed) == "m"
        assert chosen(RoutingCriteria(), decode, mixed, prefiller("p")) == "d"

    def test_a_prompt_needs_room_for_itself_only_where_it_is_computed(self) -> None:
        facts = RoutingCriteria(num_prompt_tokens=60, max_output=60)
        decode = replica("d", role="decode")
        assert prefills(facts, decode, prefiller("p", max_tokens=60), prefiller("q", max_tokens=59)) == ["p"]

    def test_doubtful_peers_are_named_only_where_all_are(self) -> None:
        decode, doubtful = replica("d", role="decode"), prefiller("p", circuit_open_until_s=BROKEN)
        assert prefills(RoutingCriteria(), decode, doubtful, prefiller("q", load=busy(9))) == ["q"]
        assert prefills(RoutingCriteria(), decode, doubtful) == ["p"]

    def test_each_role_has_its_own_policy(self) -> None:
        picks = InstanceSelector("least_loaded", "round_robin", None, Random(0).randrange, None)
        cluster = [
            replica("d", role="decode"),
            replica("e", role="decode", load=busy(1)),
            prefiller("p"),
            prefiller("q"),
        ]
        pairs = [picks.select(RoutingCriteria(), cluster, NOW_S) for _ in range(4)]
        assert [(pair.instance.instance_id, pair.prefill_peers[0].instance_id) for pair in pairs if pair] == [
            ("d", "p"),
            ("d", "q"),
            ("d", "p"),
            ("d", "q"),
        ]


class TestRoundRobin:
    @settings(max_examples=60, deadline=None)
    @given(like_ones, st.integers(1, 5))
    def test_everybody_gets_the_same_number_of_turns(self, replicas: list[InstanceInfo], rounds: int) -> None:
        picks = chooser("round_robin")
        turns = Counter(
            pair.instance.instance_id
            for _ in range(rounds * len(replicas))
            if (pair := picks.select(RoutingCriteria(), replicas, NOW_S))
        )
        assert turns == {one.instance_id: rounds for one in replicas}

    def test_requests_that_fit_only_some_do_not_upset_the_turns_of_the_others(self) -> None:
        """Long and short requests in turn: a mere counter would send every short one to the same instance."""
        picks = chooser("round_robin")
        cluster = [replica("large"), replica("b", max_tokens=10), replica("c", max_tokens=10)]
        turns = Counter()
        for _ in range(30):
            picks.select(RoutingCriteria(num_prompt_tokens=500), cluster, NOW_S)
            pair = picks.select(RoutingCriteria(num_prompt_tokens=5), cluster, NOW_S)
            assert pair is not None
            turns[pair.instance.instance_id] += 1
        assert turns == {"b": 15, "c": 15}

    def test_what_it_remembers_does_not_grow_with_instances_that_come_and_go(self) -> None:
        picks = chooser("round_robin")
        for number in range(100):
            picks.select(RoutingCriteria(), [replica(f"i{number}")], NOW_S)
        assert len(picks._mixed._last_turns) == 1


class TestLeastLoaded:
    @settings(max_examples=60, deadline=None)
    @given(like_ones)
    def test_nobody_has_less_to_do(self, replicas: list[InstanceInfo]) -> None:
        assert relative_load(routing_policy.least_loaded(replicas)) == min(map(relative_load, replicas))

    def test_load_is_relative_to_what_runs_at_once(self) -> None:
        assert (
            chosen(
                RoutingCriteria(), replica("a", load=busy(4, max_running=8)), replica("b", load=busy(5, max_running=64))
            )
            == "b"
        )

    def test_those_who_wait_count_as_those_who_run(self) -> None:
        assert chosen(RoutingCriteria(), replica("a", load=busy(1, waiting=4)), replica("b", load=busy(2))) == "b"

    def test_bookings_count_before_the_instance_reports_them(self) -> None:
        assert chosen(RoutingCriteria(), replica("a", num_reserved=3), replica("b", load=busy(2))) == "b"

    def test_what_is_booked_and_reported_counts_once(self) -> None:
        """Else an instance looks twice as busy the moment it has told of its streams, and the next ones all avoid it."""
        told = replica("a", num_reserved=3, num_reserved_at_report=3, load=busy(3))
        assert chosen(RoutingCriteria(), told, replica("b", num_reserved=4)) == "a"
        assert relative_load(told) == relative_load(replica("a", num_reserved=3))

    def test_streams_that_ended_since_the_report_count_no_more(self) -> None:
        ended = replica("a", num_reserved=1, num_reserved_at_report=4, load=busy(4))
        assert chosen(RoutingCriteria(), ended, replica("b", load=busy(2))) == "a"

    def test_equal_loads_are_settled_by_free_blocks(self) -> None:
        assert chosen(RoutingCriteria(), replica("a", load=busy(1, free_blocks=10)), replica("b", load=busy(1))) == "b"


class TestChance:
    @settings(max_examples=60, deadline=None)
    @given(like_ones, st.integers(0, 999))
    def test_power_of_two_picks_the_less_loaded_of_two(self, replicas: list[InstanceInfo], seed: int) -> None:
        drawn: list[int] = []

        def chance(below: int) -> int:
            drawn.append(Random(seed + len(drawn)).randrange(below))
            return drawn[-1]

        one = routing_policy.power_of_two(replicas, chance)
        if len(replicas) > 1:
            first = replicas[drawn[0]]
            beaten = [other for other in replicas if other is not one and relative_load(other) >= relative_load(one)]
            assert beaten, "the most loaded one wins against nobody"
            assert one is first or relative_load(one) <= relative_load(first)

    def test_power_of_two_can_draw_every_two(self) -> None:
        ones = [replica(name, load=busy(load)) for load, name in enumerate("abcd")]
        winners = {
            routing_policy.power_of_two(ones, _told(first, second)).instance_id
            for first in range(4)
            for second in range(3)
        }
        assert winners == {"a", "b", "c"}

    def test_random_can_choose_everybody(self) -> None:
        ones = [replica(name) for name in "abcd"]
        assert [routing_policy.random(ones, _told(number)).instance_id for number in range(4)] == list("abcd")


class TestPrefix:
    def index(self, **cached: int) -> PrefixIndex:
        """How many blocks of the prompt each has."""
        index = PrefixIndex()
        for instance, number in cached.items():
            index.apply(instance, KvEvents(0, [(True, block) for block in PROMPT[:number]]))
        return index

    def choose(self, index: PrefixIndex, *replicas: InstanceInfo) -> str:
        return routing_policy.prefix(replicas, PROMPT, index).instance_id

    def test_the_longest_cached_prefix_wins(self) -> None:
        index = self.index(a=2, b=8, c=5)
        assert self.choose(index, replica("a"), replica("b", load=busy(1)), replica("c")) == "b"

    def test_equal_prefixes_are_settled_by_load(self) -> None:
        index = self.index(a=5, b=5)
        assert self.choose(index, replica("a", load=busy(1)), replica("b")) == "b"

    def test_an_overloaded_instance_is_spared_although_it_knows_the_prompt(self) -> None:
        index = self.index(a=len(PROMPT))
        assert self.choose(index, replica("a", load=busy(4)), replica("b")) == "a"
        assert self.choose(index, replica("a", load=busy(6)), replica("b")) == "b"

    def test_a_block_more_is_not_worth_much_load(self) -> None:
        index = self.index(a=5, b=4)
        assert self.choose(index, replica("a", load=busy(4)), replica("b")) == "b"

    def test_where_nobody_knows_the_prompt_the_load_decides(self) -> None:
        assert self.choose(self.index(), replica("a", load=busy(1)), replica("b")) == "b"
        assert routing_policy.prefix([replica("a", load=busy(1)), replica("b")], [], None).instance_id == "b"

    @settings(max_examples=60, deadline=None)
    @given(like_ones, st.dictionaries(names, st.integers(0, 10)))
    def test_a_match_costs_at_most_a_bounded_excess_of_load(
        self, replicas: list[InstanceInfo], cached: dict[str, int]
    ) -> None:
        index = self.index(**cached)
        one = routing_policy.prefix(replicas, PROMPT, index)
        least = routing_policy.least_loaded(replicas)
        assert relative_load(one) <= relative_load(least) + PREFIX_WEIGHT + 1e-9
        if one is not least:
            assert cached.get(one.instance_id, 0) > cached.get(least.instance_id, 0) or relative_load(
                one
            ) == relative_load(least)


class TestSession:
    sessions = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=30)

    @settings(max_examples=60, deadline=None)
    @given(like_ones, sessions, st.data())
    def test_only_the_sessions_of_a_lost_instance_move(
        self, replicas: list[InstanceInfo], sessions: list[str], data: st.DataObject
    ) -> None:
        lost = data.draw(st.sampled_from(replicas))
        left = [one for one in replicas if one is not lost]
        for key in sessions:
            before = routing_policy.session(replicas, key)
            if before is not lost:
                assert routing_policy.session(left, key) is before

    @settings(max_examples=60, deadline=None)
    @given(like_ones, sessions)
    def test_a_session_does_not_depend_on_order_load_or_incarnation(
        self, replicas: list[InstanceInfo], sessions: list[str]
    ) -> None:
        again = [replace(one, instance_id=f"new-{one.instance_id}", num_reserved=0) for one in reversed(replicas)]
        for key in sessions:
            assert routing_policy.session(replicas, key).url == routing_policy.session(again, key).url

    def test_sessions_are_spread_over_all(self) -> None:
        ones = [replica(name) for name in "abcd"]
        counts = Counter(routing_policy.session(ones, f"session {number}").instance_id for number in range(400))
        assert all(60 <= counts[name] <= 140 for name in "abcd")

    def test_without_a_key_the_load_decides(self) -> None:
        assert routing_policy.session([replica("a", load=busy(1)), replica("b")], "").instance_id == "b"
