"""The known instances: leases, suspicion, probes, refusals, breakers and reservations."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.proto.kv_events import KvEvents
from onward.proto.router import InstanceLoad
from onward.router.instance_registry import (
    FAILURES_TO_OPEN_CIRCUIT,
    FIRST_OPEN_S,
    GONE_AFTER_S,
    MAX_INSTANCES,
    MAX_OPEN_S,
    PROBE_EVERY_S,
    PROBE_LOST_AFTER_S,
    SUSPECT_AFTER_S,
    InstanceInfo,
    InstanceRegistry,
    InstanceState,
    Reservation,
)
from onward.router.prefix_index import RESEND_ALL
from tests.router.members import LAYOUT, registration

BOOKING_MOVES = [*["book"] * 4, *["release"] * 5, *["join"] * 2, "leave", "silence"]
"""Places are given back more often than taken, so that some are twice while others are open."""


def of(*instances: str) -> InstanceRegistry:
    replicas = InstanceRegistry("a-router", wants_kv_events=False)
    for instance in instances:
        assert not replicas.register(registration(instance), 0.0).error
    return replicas


def seen(replicas: InstanceRegistry, instance: str, now_s: float) -> InstanceInfo:
    return next(replica for replica in replicas.list_instances(now_s) if replica.instance_id == instance)


def learnt(number: int, *blocks: bytes) -> KvEvents:
    return KvEvents(number, [(True, block) for block in blocks])


class TestRegistering:
    def test_an_instance_is_told_who_it_speaks_to_and_when_to_come_again(self) -> None:
        answer = InstanceRegistry("a-router", wants_kv_events=False).register(registration("a"), 0.0)
        assert (answer.router, answer.interval_s, answer.error, answer.wants_kv_events) == (
            "a-router",
            1.0,
            "",
            False,
        )

    def test_it_is_shown_as_it_last_described_itself(self) -> None:
        replicas = of("a")
        replicas.register(registration("a", state="restarting", load=InstanceLoad(running=3), max_tokens=77), 1.0)
        replica = seen(replicas, "a", 1.0)
        assert (replica.state, replica.load.running, replica.max_tokens) == (InstanceState.RESTARTING, 3, 77)

    def test_a_new_incarnation_at_the_same_url_replaces_the_old_one(self) -> None:
        replicas = of("a")
        replicas.register(registration("b", url="http://a/"), 1.0)
        assert [replica.instance_id for replica in replicas.list_instances(1.0)] == ["b"]
        assert replicas.tick(1.0) == ["a"]

    def test_a_late_message_of_a_replaced_incarnation_does_not_take_its_url_back(self) -> None:
        replicas = of("a")
        replicas.register(registration("b", url="http://a"), 1.0)
        assert "http://a" in replicas.register(registration("a"), 1.1).error
        assert [replica.instance_id for replica in replicas.list_instances(1.1)] == ["b"]

    def test_a_replaced_incarnation_may_come_back_once_the_other_has_left(self) -> None:
        replicas = of("a")
        replicas.register(registration("b", url="http://a"), 1.0)
        replicas.register(registration("b", url="http://a", state="leaving"), 2.0)
        for now_s in (3.0, 4.0):
            assert not replicas.register(registration("a"), now_s).error

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"schema_version": 999}, "schema_version"),
            ({"url": "a:8000"}, "url"),
            ({"url": "http://gpu-box..internal:23003"}, "url"),
            ({"url": "http://127.0.0.1:99999"}, "url"),
            ({"url": "http://[::1"}, "url"),
            ({"handoff_address": "tcp://127.0.0.1:99999"}, "handoff_address"),
            ({"handoff_address": "nowhere"}, "handoff_address"),
            ({"instance": "", "url": "http://a"}, "instance"),
            ({"role": "cook"}, "role"),
            ({"state": "fine"}, "state"),
        ],
    )
    def test_a_registration_that_makes_no_sense_is_refused_and_the_field_named(
        self, changes: dict[str, object], named: str
    ) -> None:
        replicas = of()
        assert replicas.register(registration("a", **changes), 0.0).error.startswith(f"{named} is ")
        assert replicas.list_instances(0.0) == []

    def test_another_model_is_taken_and_its_layout_is_its_own(self) -> None:
        replicas = of()
        replicas.register(registration("a", role="decode"), 0.0)
        layout = msgspec.structs.replace(LAYOUT, block_size=32, fingerprint="another")
        other = registration("b", model="another", role="decode", kv_layout=layout)
        assert not replicas.register(other, 1.0).error
        assert replicas.known_models() == {"a-model": frozenset(), "another": frozenset()}

    def test_a_model_is_known_for_a_minute_after_its_last_instance(self) -> None:
        replicas = of("a")
        replicas.register(registration("b", model="another", model_aliases=["alias"]), 0.0)
        replicas.register(registration("b", model="another", state="leaving"), 10.0)
        replicas.register(registration("a"), 69.0)
        replicas.tick(69.0)
        assert replicas.known_models() == {"a-model": frozenset(), "another": frozenset({"alias"})}
        replicas.register(registration("a"), 70.0)
        replicas.tick(70.0)
        assert replicas.known_models() == {"a-model": frozenset()}

    def test_only_instances_of_the_same_model_can_take_its_streams(self) -> None:
        replicas = of("a")
        assert replicas.register(registration("b", model="another"), 0.0).num_other_instances == 0
        assert replicas.register(registration("c", model="another"), 0.0).num_other_instances == 1
        assert replicas.num_ready_others("http://nowhere") == -1

    @pytest.mark.parametrize("changes", [{"model": ""}, {"model": "x" * 257}, {"model_aliases": [""]}])
    def test_a_name_that_no_client_can_ask_for_is_refused(self, changes: dict[str, object]) -> None:
        error = of().register(registration("a", **changes), 0.0).error
        assert error.startswith(f"{next(iter(changes))} is ")

    def test_an_upgrade_of_the_only_instance_may_change_the_model(self) -> None:
        replicas = of("a")
        assert not replicas.register(registration("b", url="http://a", model="another"), 1.0).error

    @pytest.mark.parametrize("first", [{"role": "decode"}, {"role": "prefill"}, {"handoff_address": "tcp://x:1"}])
    def test_another_layout_is_refused_among_those_that_pass_kv(self, first: dict[str, object]) -> None:
        replicas = of()
        replicas.register(registration("a", **first), 0.0)
        other = registration("b", role="decode", kv_layout=msgspec.structs.replace(LAYOUT, block_size=32))
        assert replicas.register(other, 0.0).error == "block_size is 16 here and 32 there"

    def test_a_mixed_instance_that_passes_no_kv_may_compute_in_its_own_way(self) -> None:
        replicas = of("a")
        other = msgspec.structs.replace(LAYOUT, dtype="float32")
        assert not replicas.register(registration("b", kv_layout=other), 0.0).error
        assert not replicas.register(registration("c", role="decode", kv_layout=other), 0.0).error

    def test_a_layout_that_is_only_known_once_it_has_started_is_compared_then(self) -> None:
        replicas = of()
        replicas.register(registration("a", role="prefill"), 0.0)
        assert not replicas.register(registration("b", role="decode", state="starting", kv_layout=None), 0.0).error
        ready = registration("b", role="decode", kv_layout=msgspec.structs.replace(LAYOUT, dtype="float32"))
        assert replicas.register(ready, 1.0).error.startswith("dtype is ")
        assert replicas.get("b") is None
        assert replicas.tick(1.0) == ["b"]

    def test_there_is_a_bound_on_instances(self) -> None:
        replicas = of(*(f"a{number}" for number in range(MAX_INSTANCES)))
        assert replicas.register(registration("one-more"), 0.0).error
        assert not replicas.register(registration("a7"), 0.0).error


class TestLeases:
    def test_silence_makes_an_instance_suspect_and_then_gone(self) -> None:
        replicas = of("a")
        assert seen(replicas, "a", SUSPECT_AFTER_S - 0.1).state is InstanceState.READY
        assert seen(replicas, "a", SUSPECT_AFTER_S).state is InstanceState.SUSPECT
        assert replicas.tick(GONE_AFTER_S - 0.1) == []
        assert seen(replicas, "a", GONE_AFTER_S).state is InstanceState.GONE
        assert replicas.tick(GONE_AFTER_S) == ["a"]
        assert replicas.get("a") is None
        assert replicas.tick(GONE_AFTER_S) == []

    def test_a_suspect_that_speaks_again_is_none(self) -> None:
        replicas = of("a")
        replicas.tick(SUSPECT_AFTER_S)
        replicas.register(registration("a"), SUSPECT_AFTER_S + 1)
        assert seen(replicas, "a", SUSPECT_AFTER_S + 1).state is InstanceState.READY

    @pytest.mark.parametrize("state", ["starting", "draining"])
    def test_one_that_must_not_be_chosen_does_not_become_choosable_by_falling_silent(self, state: str) -> None:
        replicas = of()
        replicas.register(registration("a", state=state), 0.0)
        assert seen(replicas, "a", SUSPECT_AFTER_S).state is InstanceState(state)

    def test_one_that_says_it_leaves_is_gone_at_once(self) -> None:
        replicas = of("a", "b")
        assert not replicas.register(registration("a", state="leaving"), 1.0).error
        assert [replica.instance_id for replica in replicas.list_instances(1.0)] == ["b"]
        assert replicas.tick(1.0) == ["a"]

    def test_the_leaving_of_a_stranger_is_nobodys_loss(self) -> None:
        replicas = of("a")
        replicas.register(registration("b", state="leaving"), 1.0)
        assert replicas.tick(1.0) == []


class TestProbes:
    def test_a_static_instance_is_there_after_its_first_answer(self) -> None:
        replicas = of()
        replicas.add_static("http://static:1/")
        assert replicas.list_instances(0.0) == []
        assert replicas.due_probes(0.0) == ["http://static:1"]
        assert replicas.on_probe_result("http://static:1/", registration("a"), 0.2) is None
        assert seen(replicas, "a", 0.2).url == "http://static:1"

    def test_each_is_asked_again_a_second_after_it_was(self) -> None:
        replicas = of()
        replicas.add_static("http://a")
        replicas.due_probes(0.0)
        replicas.on_probe_result("http://a", None, 0.3)
        assert replicas.due_probes(PROBE_EVERY_S - 0.1) == []
        assert replicas.due_probes(PROBE_EVERY_S) == ["http://a"]

    def test_f49_one_failed_probe_is_not_death(self) -> None:
        replicas = of()
        replicas.add_static("http://a")
        replicas.due_probes(0.0)
        replicas.on_probe_result("http://a", registration("a"), 0.0)
        replicas.due_probes(1.0)
        replicas.on_probe_result("http://a", None, 1.5)
        assert seen(replicas, "a", 1.5).state is InstanceState.READY
        assert replicas.tick(1.5) == []
        replicas.due_probes(2.0)
        replicas.on_probe_result("http://a", registration("a"), 2.0)
        assert seen(replicas, "a", 2.0 + SUSPECT_AFTER_S - 0.1).state is InstanceState.READY

    def test_f49_one_hung_probe_does_not_delay_the_others(self) -> None:
        replicas = of()
        for name in ("hung", "b", "c"):
            replicas.add_static(f"http://{name}")
        assert replicas.due_probes(0.0) == ["http://hung", "http://b", "http://c"]
        for second in range(1, int(PROBE_LOST_AFTER_S)):
            for name in ("b", "c"):
                replicas.on_probe_result(f"http://{name}", registration(name), second - 0.5)
            assert replicas.due_probes(float(second)) == ["http://b", "http://c"]
            assert {replica.state for replica in replicas.list_instances(float(second))} == {InstanceState.READY}

    def test_a_probe_that_nobody_reports_on_is_asked_again_in_the_end(self) -> None:
        replicas = of()
        replicas.add_static("http://a")
        replicas.due_probes(0.0)
        assert replicas.due_probes(PROBE_LOST_AFTER_S - 0.1) == []
        assert replicas.due_probes(PROBE_LOST_AFTER_S) == ["http://a"]

    def test_probes_without_answers_end_in_the_same_silence_and_go_on(self) -> None:
        replicas = of()
        replicas.add_static("http://a")
        replicas.on_probe_result("http://a", registration("a"), 0.0)
        assert seen(replicas, "a", SUSPECT_AFTER_S).state is InstanceState.SUSPECT
        assert replicas.tick(GONE_AFTER_S) == ["a"]
        assert replicas.due_probes(GONE_AFTER_S) == ["http://a"]

    def test_a_static_instance_that_does_not_fit_is_named_with_the_difference(self) -> None:
        replicas = of("a")
        replicas.add_static("http://b")
        replicas.register(registration("a", role="decode"), 0.0)
        layout = msgspec.structs.replace(LAYOUT, block_size=32)
        error = replicas.on_probe_result("http://b", registration("b", role="decode", kv_layout=layout), 0.0)
        assert error == "block_size is 16 here and 32 there"


class TestUnreachable:
    def test_an_instance_stays_suspect_until_a_probe_reaches_it(self) -> None:
        replicas = of("a", "b")
        replicas.record_unreachable("a", 0.5)
        replicas.register(registration("a"), 1.0)
        assert [(one.instance_id, one.state) for one in replicas.list_instances(1.0)] == [
            ("a", InstanceState.SUSPECT),
            ("b", InstanceState.READY),
        ]
        assert replicas.due_probes(1.0) == ["http://a"]
        replicas.on_probe_result("http://a", None, 1.2)
        assert seen(replicas, "a", 1.2).state is InstanceState.SUSPECT
        assert replicas.due_probes(2.0) == ["http://a"]
        assert replicas.on_probe_result("http://a", registration("a"), 2.1) is None
        assert seen(replicas, "a", 2.1).state is InstanceState.READY
        assert replicas.due_probes(9.0) == []

    def test_a_request_that_reaches_it_will_do_as_well(self) -> None:
        replicas = of("a")
        replicas.record_unreachable("a", 0.5)
        replicas.record_success("a", 0.6)
        assert seen(replicas, "a", 0.6).state is InstanceState.READY
        assert replicas.due_probes(0.6) == []

    def test_another_instance_that_answers_there_shows_nothing(self) -> None:
        replicas = of("a")
        replicas.record_unreachable("a", 0.5)
        replicas.due_probes(0.5)
        replicas.on_probe_result("http://a", registration("b"), 0.6)
        assert [(one.instance_id, one.state) for one in replicas.list_instances(0.6)] == [("a", InstanceState.SUSPECT)]

    def test_a_new_address_is_not_doubted_and_the_old_one_not_probed_any_more(self) -> None:
        replicas = of("a")
        replicas.record_unreachable("a", 0.5)
        replicas.register(registration("a", url="http://other"), 1.0)
        replicas.tick(1.0)
        assert seen(replicas, "a", 1.0).state is InstanceState.READY
        assert replicas.due_probes(1.0) == []

    def test_a_static_instance_is_probed_as_before(self) -> None:
        replicas = of()
        replicas.add_static("http://a")
        replicas.due_probes(0.0)
        replicas.on_probe_result("http://a", registration("a"), 0.0)
        replicas.record_unreachable("a", 0.1)
        replicas.due_probes(1.0)
        replicas.on_probe_result("http://a", registration("a"), 1.1)
        assert seen(replicas, "a", 1.1).state is InstanceState.READY
        assert replicas.due_probes(2.0) == ["http://a"]


class TestBreaker:
    def failing(self, times: int, now_s: float = 0.0) -> InstanceRegistry:
        replicas = of("a")
        for _ in range(times):
            replicas.record_failure("a", now_s)
        return replicas

    def test_it_opens_after_some_failures_in_a_row(self) -> None:
        assert seen(self.failing(FAILURES_TO_OPEN_CIRCUIT - 1), "a", 0.0).circuit_open_until_s <= 0.0
        assert seen(self.failing(FAILURES_TO_OPEN_CIRCUIT), "a", 0.0).circuit_open_until_s == FIRST_OPEN_S

    def test_a_success_in_between_starts_the_count_anew(self) -> None:
        replicas = self.failing(FAILURES_TO_OPEN_CIRCUIT - 1)
        replicas.record_success("a", 0.0)
        replicas.record_failure("a", 0.0)
        assert seen(replicas, "a", 0.0).circuit_open_until_s <= 0.0

    def test_all_streams_of_an_instance_failing_together_are_one_fault(self) -> None:
        assert seen(self.failing(64), "a", 0.0).circuit_open_until_s == FIRST_OPEN_S

    def test_half_open_it_lets_one_through_until_that_one_has_succeeded(self) -> None:
        replicas = self.failing(FAILURES_TO_OPEN_CIRCUIT)
        now_s = FIRST_OPEN_S
        assert seen(replicas, "a", now_s).circuit_open_until_s <= now_s
        replicas.reserve("a")
        assert seen(replicas, "a", now_s).circuit_open_until_s > now_s
        replicas.record_success("a", now_s)
        assert seen(replicas, "a", now_s).circuit_open_until_s <= now_s

    def test_each_failed_trial_doubles_the_pause_up_to_a_bound(self) -> None:
        replicas = self.failing(FAILURES_TO_OPEN_CIRCUIT)
        pauses, now_s = [], 0.0
        for _ in range(6):
            now_s = seen(replicas, "a", now_s).circuit_open_until_s
            replicas.register(registration("a"), now_s)
            replicas.reserve("a").release()
            replicas.record_failure("a", now_s)
            pauses.append(seen(replicas, "a", now_s).circuit_open_until_s - now_s)
        assert pauses == [2.0, 4.0, 8.0, MAX_OPEN_S, MAX_OPEN_S, MAX_OPEN_S]

    def test_once_closed_it_opens_for_the_short_pause_again(self) -> None:
        replicas = self.failing(FAILURES_TO_OPEN_CIRCUIT)
        replicas.reserve("a")
        replicas.record_failure("a", FIRST_OPEN_S)
        replicas.record_success("a", 3.0)
        for _ in range(FAILURES_TO_OPEN_CIRCUIT):
            replicas.record_failure("a", 4.0)
        assert seen(replicas, "a", 4.0).circuit_open_until_s == 4.0 + FIRST_OPEN_S

    def test_a_new_incarnation_starts_with_a_closed_one(self) -> None:
        replicas = self.failing(FAILURES_TO_OPEN_CIRCUIT)
        replicas.register(registration("b", url="http://a"), 0.5)
        assert seen(replicas, "b", 0.5).circuit_open_until_s <= 0.5

    def test_a_lost_connection_makes_suspect_until_the_next_sign_of_life(self) -> None:
        replicas = self.failing(1)
        assert seen(replicas, "a", 0.0).state is InstanceState.SUSPECT
        replicas.register(registration("a"), 0.5)
        assert seen(replicas, "a", 0.5).state is InstanceState.READY

    def test_a_failure_during_a_restart_that_was_announced_does_not_hide_the_restart(self) -> None:
        replicas = of()
        replicas.register(registration("a", state="restarting"), 0.0)
        replicas.record_failure("a", 0.0)
        assert seen(replicas, "a", 0.0).state is InstanceState.RESTARTING

    def test_registering_alone_does_not_close_it(self) -> None:
        """A health answer that lies: it registers each second, and produces nothing."""
        replicas = self.failing(FAILURES_TO_OPEN_CIRCUIT)
        replicas.register(registration("a"), 0.5)
        assert seen(replicas, "a", 0.5).circuit_open_until_s == FIRST_OPEN_S

    def test_news_of_an_instance_that_is_gone_are_no_fault(self) -> None:
        replicas = of()
        replicas.record_failure("a", 0.0)
        replicas.record_success("a", 0.0)
        assert replicas.list_instances(0.0) == []


class TestBookings:
    def test_f51_a_booking_whose_dispatch_failed_is_given_back_however_often_it_is_released(self) -> None:
        replicas = of("a")
        first, second = replicas.reserve("a"), replicas.reserve("a")
        assert seen(replicas, "a", 0.0).num_reserved == 2
        for _ in range(3):
            first.release()
        assert seen(replicas, "a", 0.0).num_reserved == 1
        second.release()
        assert seen(replicas, "a", 0.0).num_reserved == 0

    def test_f51_bookings_end_with_their_incarnation(self) -> None:
        replicas = of("a")
        old = replicas.reserve("a")
        replicas.register(registration("a", state="leaving"), 1.0)
        replicas.register(registration("a"), 2.0)
        assert seen(replicas, "a", 2.0).num_reserved == 0
        replicas.reserve("a")
        old.release()
        assert seen(replicas, "a", 2.0).num_reserved == 1

    def test_f51_a_booking_of_nobody_counts_for_nobody(self) -> None:
        replicas = of("a")
        replicas.reserve("b").release()
        assert seen(replicas, "a", 0.0).num_reserved == 0

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from(BOOKING_MOVES), st.integers(0, 2)), min_size=10, max_size=40))
    def test_f51_bookings_are_those_taken_since_it_came_and_not_given_back_whatever_the_order(
        self, moves: list[tuple[str, int]]
    ) -> None:
        replicas, now_s = of("a"), 0.0
        taken: list[Reservation] = []
        open_ones: set[int] = set()
        for move, number in moves:
            now_s += 0.5
            match move:
                case "book":
                    if replicas.get("a"):
                        open_ones.add(len(taken))
                    taken.append(replicas.reserve("a"))
                case "release" if taken:
                    index = max(0, len(taken) - 1 - number)
                    taken[index].release()
                    open_ones.discard(index)
                case "leave":
                    replicas.register(registration("a", state="leaving"), now_s)
                    open_ones.clear()
                case "silence":
                    now_s += GONE_AFTER_S
                    replicas.tick(now_s)
                    open_ones.clear()
                case _:
                    replicas.register(registration("a"), now_s)
            replica = replicas.get("a")
            assert (replica.num_reserved if replica else 0) == len(open_ones)


class TestKvEvents:
    def test_what_an_instance_has_cached_is_known_until_it_is_gone(self) -> None:
        replicas = InstanceRegistry("a-router", wants_kv_events=True)
        answer = replicas.register(registration("a", kv_events=learnt(0, b"x", b"y")), 0.0)
        assert (answer.wants_kv_events, answer.next_kv_event) == (True, 2)
        assert replicas.index is not None
        assert replicas.index.matched_blocks("a", [b"x", b"y", b"z"]) == 2
        replicas.tick(GONE_AFTER_S)
        assert len(replicas.index) == 0

    def test_a_gap_is_answered_by_asking_for_everything(self) -> None:
        replicas = InstanceRegistry("a-router", wants_kv_events=True)
        replicas.register(registration("a", kv_events=learnt(0, b"x")), 0.0)
        answer = replicas.register(registration("a", kv_events=learnt(5, b"y")), 1.0)
        assert answer.next_kv_event == RESEND_ALL

    def test_a_registration_without_events_is_told_where_to_go_on(self) -> None:
        replicas = InstanceRegistry("a-router", wants_kv_events=True)
        assert replicas.next_kv_event("http://a") == RESEND_ALL
        assert replicas.register(registration("a"), 0.0).next_kv_event == RESEND_ALL
        replicas.register(registration("a", kv_events=learnt(0, b"x")), 0.0)
        assert replicas.register(registration("a"), 1.0).next_kv_event == 1
        assert replicas.next_kv_event("http://a") == 1

    def test_a_new_engine_of_the_same_instance_has_an_empty_cache_and_counts_anew(self) -> None:
        replicas = InstanceRegistry("a-router", wants_kv_events=True)
        replicas.register(registration("a", engine="e1", kv_events=learnt(0, b"x")), 0.0)
        answer = replicas.register(registration("a", engine="e2", kv_events=learnt(1, b"y")), 1.0)
        assert answer.next_kv_event == RESEND_ALL
        assert replicas.index is not None
        assert replicas.index.matched_blocks("a", [b"x"]) == 0

    def test_nothing_is_kept_where_nobody_wants_it(self) -> None:
        replicas = of()
        answer = replicas.register(registration("a", kv_events=learnt(0, b"x")), 0.0)
        assert not answer.wants_kv_events
        assert replicas.index is None
