"""The changes of the prefix cache, as a router follows them: from any point on it comes to know what the cache knows."""

from hypothesis import given, settings
from hypothesis import strategies as st

from onward.engine.scheduling import block_pool
from onward.engine.scheduling.block_pool import KvEventLog
from onward.proto.engine import KvEventsReply, QueryKvEvents
from onward.proto.kv_events import KvEvents
from tests.engine.harness import API, Harness


class Reader:
    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self.next_number = -1

    def hear(self, events: KvEvents) -> None:
        if events.reset:
            self.known.clear()
        else:
            assert events.first_event == self.next_number, "nothing is missing between two answers"
        for known, name in events.changes:
            (self.known.add if known else self.known.discard)(name)
        self.next_number = events.next_number


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["learn", "forget", "renew", "read", "late"]), max_size=200), st.integers(1, 20))
def test_a_reader_comes_to_know_what_the_cache_knows(acts: list[str], kept: int) -> None:
    log, reader, names, count = KvEventLog(), Reader(), dict[bytes, None](), 0
    log._changes = type(log._changes)(maxlen=kept)
    for act in acts:
        if act == "learn":
            count += 1
            names[str(count).encode()] = None
            log.append(True, str(count).encode())
        elif act == "forget" and names:
            name = next(iter(names))
            del names[name]
            log.append(False, name)
        elif act == "renew":
            names.clear()
            log.reset()
        elif act == "read":
            reader.hear(log.since(reader.next_number, names))
            assert reader.known == set(names)


def test_an_engine_answers_what_its_cache_has_learnt_and_forgotten() -> None:
    harness = Harness(num_blocks=8, block_size=4)
    answers: list[KvEvents] = []
    hear = harness._hear
    harness._hear = lambda m: answers.append(m.events) if isinstance(m, KvEventsReply) else hear(m)  # type: ignore[method-assign]
    reader = Reader()

    def ask() -> None:
        harness.core.receive_from_api(API, QueryKvEvents(0, 1, reader.next_number), harness.now_s)
        harness.deliver()
        reader.hear(answers.pop())
        assert reader.known == set(harness.core.scheduler.pool.cached_hashes)

    ask()
    for index in range(5):
        harness.submit(f"r{index}", [index + 1] * 13, max_tokens=4)
        harness.run_until_idle()
        ask()
        assert reader.known
    harness.crash_worker()
    ask()
    assert not reader.known


def test_a_long_answer_comes_in_parts(monkeypatch) -> None:
    monkeypatch.setattr(block_pool, "MAX_CHANGES_PER_ANSWER", 3)
    log, reader = KvEventLog(), Reader()
    reader.next_number = 0
    for number in range(8):
        log.append(True, bytes([number]))
    for expected in (3, 6, 8):
        reader.hear(log.since(reader.next_number, ()))
        assert len(reader.known) == expected
