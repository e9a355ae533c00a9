"""Recordings: what a core was given and answered can be run again, with the same answers and without the text."""

import logging
import random
import re
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onward.clock import SystemClock
from onward.config import EngineConfig
from onward.engine.core import EngineCore
from onward.engine.main import EngineProcess
from onward.engine.recording import recording_file
from onward.engine.recording.recorder import (
    ApiMessageRecord,
    ApiOutboxRecord,
    CrashRecord,
    DecodeMessageRecord,
    HandoffOutboxRecord,
    KvReportRecord,
    PeerSendRecord,
    PlanRecord,
    PrefillMessageRecord,
    Record,
    RecordingEngineCore,
    StepResultRecord,
)
from onward.engine.recording.recording_file import RecordingReader, RecordingWriter
from onward.engine.recording.replayer import ReplayResult, first_difference, replay
from onward.engine.recording.token_anonymizer import TokenAnonymizer
from onward.engine.scheduling.block_pool import BlockPool
from onward.engine.step_result_processor import StepResultProcessor
from onward.errors import InvalidRequest, StartupError
from onward.proto.control import StartEngine
from onward.proto.engine import CallerLimits, KvEventsReply, QueryKvEvents, Submit, TokenDelta, TokenDeltas
from onward.proto.handoff import PrefillRequest
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import AssignSlot, RunSlot, SlotAdvanced, SlotTokens, StepPlan, StepResult, TokenLogprobs
from onward.transport.control_channel import ControlChannel
from onward.transport.curve import make_private_address
from onward.transport.zmq_sockets import SocketPoller
from tests.engine.harness import API, Harness
from tests.engine.pd_cluster import Cluster

HANDOVER_RECORDS = {PrefillMessageRecord, DecodeMessageRecord, PeerSendRecord, KvReportRecord, HandoffOutboxRecord}

decoder = msgspec.msgpack.Decoder(Record)


class RecordedHarness(Harness):
    def __init__(self, path: Path, **config: object) -> None:
        super().__init__(**config)  # type: ignore[arg-type]
        self.writer = RecordingWriter(str(path))
        self.core = RecordingEngineCore(self.config, "e1", self.worker.hello(), self.writer, 1000.0)

    def answer(self) -> None:
        super().answer()
        self.tick(0.0)


def eventful_run(path: Path, **config: object) -> RecordedHarness:
    """Preemptions, prefix hits, vectors, questions about the cache, aborts by id and by name, a refusal, a deadline, a
    death of worker and one of an api, and the end."""
    harness = RecordedHarness(path, num_blocks=17, max_num_seqs=4, max_num_batched_tokens=16, **config)
    for index in range(8):
        prompt = [3 + index % 3 + i // 2 for i in range(10 + index)]
        harness.submit(f"r{index}-0", prompt, max_tokens=30, seed=index, temperature=float(index % 2), end=(5,))
    harness.submit("long-0", [1] * 60, max_tokens=50)
    limits = CallerLimits(max_in_flight=2, tokens_per_minute=9)
    for index in range(3):
        harness.submit(f"limited{index}-0", [2] * 9, max_tokens=9, caller="ann", caller_limits=limits)
    harness.abort_by_name("r4", caller="ann")
    harness.submit("vector-0", [7, 8, 9, 7, 8, 9], max_tokens=1, pooling="mean")
    harness.submit("moved-0", [1] * 5, max_tokens=3, epoch=7, admit_as_new=True, caller="ann", caller_limits=limits)
    harness.submit("late-0", [1, 2, 3], max_tokens=60, deadline_in_s=0.2, cache_salt="tenant")
    for turn in range(1000):
        while harness.plan() is not None:
            pass
        if turn == 7:
            harness.abort("r2-0")
        if turn in (8, 30):
            harness.core.receive_from_api("api-2", QueryKvEvents(turn, turn, -1), harness.now_s)
            assert any(isinstance(message, KvEventsReply) for _, message in harness.core.take_api_messages())
        if turn == 9:
            harness.abort_by_name("r3", "nobody")
        if turn == 12:
            harness.crash_worker()
            continue
        if turn == 40:
            harness.submit("last-0", [3, 3, 4, 4, 5], max_tokens=30)
            harness.core.on_api_lost(API, harness.now_s)
        if not harness.plans:
            break
        harness.answer()
    assert harness.core.idle
    harness.core.close()
    assert harness.metric("preemptions") > 0
    assert harness.metric("worker_losses") == 1
    harness.writer.close()
    return harness


def replayed(path: Path) -> ReplayResult:
    return replay(RecordingReader(path))


def records_of(path: Path) -> list[Record]:
    return [decoder.decode(record) for record in RecordingReader(path)]


@pytest.mark.parametrize("record_tokens", [False, True])
def test_an_eventful_run_replays_with_the_same_answers(tmp_path: Path, record_tokens: bool) -> None:
    eventful_run(tmp_path / "run", record_tokens=record_tokens)
    outcome = replayed(tmp_path / "run")
    assert outcome.difference is None
    assert outcome.num_answers > 100
    assert outcome.begun.has_real_tokens is record_tokens
    kinds = {type(record) for record in records_of(tmp_path / "run")}
    assert kinds == set(Record.__args__) - HANDOVER_RECORDS - {CrashRecord}, "all that can happen without peers has"


def test_handoffs_replay_with_the_same_answers_on_both_sides(tmp_path: Path) -> None:
    cluster = Cluster(num_blocks=20)
    kinds: set[type] = set()
    sides = {"decode": cluster.decode, "prefill": cluster.prefill}
    writers = {name: RecordingWriter(str(tmp_path / name)) for name in sides}
    for name, side in sides.items():
        side.core = RecordingEngineCore(side.config, side.name, side.worker.hello(), writers[name], 1000.0)
    clients = [cluster.submit(f"r{i}-0", list(range(1, 9 + 5 * i)), max_tokens=9, seed=i) for i in range(5)]
    cluster.settle(seconds=1.0)
    assert [client.tokens for client in clients] == [cluster.decode.expected(client) for client in clients]
    for name in sides:
        writers[name].close()
        outcome = replayed(tmp_path / name)
        assert outcome.difference is None
        assert outcome.num_answers > 20
        kinds |= {type(record) for record in records_of(tmp_path / name)}
        said = [
            r
            for r in records_of(tmp_path / name)
            if isinstance(r, DecodeMessageRecord) and isinstance(r.message, PrefillRequest)
        ]
        assert all(record.message.token_ids[:3] != [1, 2, 3] for record in said), "the prompt is not in it"
    assert kinds >= HANDOVER_RECORDS


def test_a_core_that_decides_otherwise_is_found_at_its_first_other_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eventful_run(tmp_path / "run")
    monkeypatch.setattr(BlockPool, "count_cached_prefix", lambda self, names: (0, 0))
    difference = replayed(tmp_path / "run").difference
    assert difference is not None
    number, first_hit = next(
        (number, assign.num_computed)
        for number, record in enumerate(records_of(tmp_path / "run"))
        if isinstance(record, PlanRecord) and record.plan
        for assign in record.plan.assign
        if assign.num_computed
    )
    assert difference.record == number
    assert difference.where.startswith("plan.assign[")
    assert difference.where.endswith("].num_computed")
    assert (difference.recorded, difference.replayed) == (str(first_hit), "0")


def test_a_core_that_forgets_a_message_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eventful_run(tmp_path / "run")
    monkeypatch.setattr(StepResultProcessor, "charge_crash", lambda self, request, now_s: False)
    difference = replayed(tmp_path / "run").difference
    assert difference is not None
    assert difference.where == "messages"
    assert "WorkerCrashReport" in difference.recorded


def test_without_the_table_no_token_of_the_traffic_is_in_the_recording(tmp_path: Path) -> None:
    """A prompt of one token repeated: under the table it is still one token, and hardly ever the same."""
    prompt = [41] * 24
    seen = set()
    for number in range(8):
        harness = RecordedHarness(tmp_path / str(number), vocab_size=50_000)
        harness.submit("a", prompt, max_tokens=3)
        harness.submit("b", prompt, max_tokens=3, cache_salt="secret of a tenant")
        harness.run_until_idle()
        harness.submit("c", prompt, max_tokens=3)
        harness.run_until_idle()
        harness.writer.close()
        received = [r.message for r in records_of(tmp_path / str(number)) if isinstance(r, ApiMessageRecord)]
        a, b, c = (message for message in received if isinstance(message, Submit))
        assert a.prompt_token_ids == c.prompt_token_ids
        assert len(set(a.prompt_token_ids)) == 1
        assert a.cache_salt == ""
        assert b.cache_salt not in ("", "secret of a tenant")
        seen.add(a.prompt_token_ids[0])
        assert harness.clients["c"].cached, "there was a prefix hit"
        assert replayed(tmp_path / str(number)).difference is None
    assert len(seen) > 4, "each recording has its own table"


def test_every_place_with_token_ids_goes_through_one_table() -> None:
    disguise = TokenAnonymizer(1000)
    as_now = disguise.token_ids(range(1000))
    assert sorted(as_now) == list(range(1000))
    assert as_now != list(range(1000))
    assert disguise.token_ids([-1, 1000]) == [-1, 1000], "these are no tokens"
    sampling = SamplingParams(
        1,
        end_token_ids=(1, 2),
        logit_bias=((3, 0.5), (4, -1.0)),
        bad_words=((5,), (6, 7)),
        allowed_token_ids=(8, 9),
    )
    hidden_sampling = SamplingParams(
        1,
        end_token_ids=(as_now[1], as_now[2]),
        logit_bias=((as_now[3], 0.5), (as_now[4], -1.0)),
        bad_words=((as_now[5],), (as_now[6], as_now[7])),
        allowed_token_ids=(as_now[8], as_now[9]),
    )
    logprobs, hidden_logprobs = [TokenLogprobs(-1.0, 2, [(8, -0.5)])], [TokenLogprobs(-1.0, 2, [(as_now[8], -0.5)])]
    pairs = [
        (Submit(1, "r", 1, [1, 2], sampling, [3]), Submit(1, "r", 1, as_now[1:3], hidden_sampling, [as_now[3]])),
        (
            StepPlan(1, [], [AssignSlot(0, 1, "r", [1, 2], 2, 0, [7], sampling)], [RunSlot(0, 1, 2)]),
            StepPlan(1, [], [AssignSlot(0, 1, "r", as_now[1:3], 2, 0, [7], hidden_sampling)], [RunSlot(0, 1, 2)]),
        ),
        (
            StepResult(1, [SlotTokens(0, 1, 0, 2, [9], logprobs, logprobs), SlotAdvanced(1, 2, 3, logprobs)], 0.5),
            StepResult(
                1,
                [
                    SlotTokens(0, 1, 0, 2, [as_now[9]], hidden_logprobs, hidden_logprobs),
                    SlotAdvanced(1, 2, 3, hidden_logprobs),
                ],
                0.5,
            ),
        ),
        (
            TokenDeltas(1, [TokenDelta("r", 1, 0, [9], 2, 0, "stop", None, logprobs, logprobs)]),
            TokenDeltas(1, [TokenDelta("r", 1, 0, [as_now[9]], 2, 0, "stop", None, hidden_logprobs, hidden_logprobs)]),
        ),
    ]
    for message, hidden in pairs:
        assert disguise.anonymize(message) == hidden


def test_a_file_cut_short_is_replayed_as_far_as_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_file, "CHUNK_BYTES", 2000)
    eventful_run(tmp_path / "run")
    whole = (tmp_path / "run").read_bytes()
    num_records = [len(records_of(tmp_path / "run"))]
    for cut in (3, len(whole) // 3, len(whole) // 2):
        path = tmp_path / f"cut-{cut}"
        path.write_bytes(whole[:-cut])
        reader = RecordingReader(path)
        outcome = replay(reader)
        assert outcome.difference is None
        assert reader.truncated
        assert "ends in the middle" in (reader.fault or "")
        num_records.append(outcome.num_records)
    assert num_records == sorted(set(num_records), reverse=True), "less and less, and never nothing"
    assert num_records[-1] > 10


def test_a_damaged_file_says_where_it_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_file, "CHUNK_BYTES", 2000)
    eventful_run(tmp_path / "run")
    damaged = bytearray((tmp_path / "run").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    reader = RecordingReader(tmp_path / "damaged")
    outcome = replay(reader)
    assert outcome.difference is None
    assert outcome.num_records > 1
    assert not reader.truncated
    assert "is damaged" in (reader.fault or "")


@pytest.mark.parametrize("content", [b"", b"hello", recording_file.MAGIC, recording_file.MAGIC + b"\1\0"])
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"not a recording|no beginning"):
        replayed(tmp_path / "file")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="nothing-here"):
        replayed(tmp_path / "nothing-here")


def test_a_fault_that_killed_the_engine_kills_the_replay_too(tmp_path: Path) -> None:
    harness = RecordedHarness(tmp_path / "run")
    harness.submit("a", [1, 2, 3])
    harness.plan()
    with pytest.raises(AssertionError, match="is due"):
        harness.core.commit(StepResult(7, []), 1.0)
    harness.writer.close()
    last = records_of(tmp_path / "run")[-2:]
    assert isinstance(last[0], StepResultRecord)
    assert isinstance(last[1], CrashRecord)
    outcome = replayed(tmp_path / "run")
    assert outcome.difference is None
    assert "is due" in (outcome.died or "")


def test_a_fault_that_only_the_replay_has_is_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eventful_run(tmp_path / "run")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a new bug")

    monkeypatch.setattr(EngineCore, "on_worker_lost", fail)
    difference = replayed(tmp_path / "run").difference
    assert difference is not None
    assert "a new bug" in difference.replayed


def test_a_recording_that_is_there_already_is_never_overwritten(tmp_path: Path) -> None:
    paths = []
    for _ in range(3):
        harness = RecordedHarness(tmp_path / "run")
        harness.writer.close()
        paths.append(harness.writer.path.name)
    assert paths == ["run", "run.1", "run.2"]
    assert replayed(tmp_path / "run").num_records == 1


def test_a_folder_that_is_not_there_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot record to .*missing"):
        recording_file.check_recording(str(tmp_path / "missing" / "run"))
    recording_file.check_recording(str(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == [], "the check leaves nothing behind"


@pytest.mark.parametrize("hindrance", ["gone", "a file", "too many"])
def test_an_engine_that_is_started_anew_serves_though_the_recording_s_folder_is_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hindrance: str
) -> None:
    folder = tmp_path / "folder"
    if hindrance == "a file":
        folder.touch()
    elif hindrance == "too many":
        monkeypatch.setattr(recording_file, "MAX_SIBLINGS", 1)
        folder.mkdir()
        (folder / "run").touch()
    with caplog.at_level(logging.WARNING), engine_process(str(folder / "run")) as process:
        core = process._new_core(Harness().worker.hello())
        assert type(core) is EngineCore
        assert gauge(core, "onward_recording") == 0.0
        assert "no recording" in caplog.text


def test_a_record_that_cannot_be_encoded_ends_the_recording_and_not_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_process(str(tmp_path / "run")) as process, caplog.at_level(logging.WARNING):
        core = process._new_core(Harness().worker.hello())
        assert gauge(core, "onward_recording") == 1.0
        core.on_peer_send("p", True, 1 << 80)
        assert "cannot be encoded" in caplog.text
        assert gauge(core, "onward_recording") == 0.0
        core.tick(1.0)
    assert replayed(tmp_path / "run").difference is None, "what was written before is whole"


@contextmanager
def engine_process(record: str) -> Iterator[EngineProcess]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    start = StartEngine("engine-1", EngineConfig(record=record), make_private_address("engine-1")[0])
    with ours, theirs, closing(SocketPoller()) as wires:
        process = EngineProcess(start, ControlChannel(ours), wires, SystemClock(), before_ready=lambda: None)
        yield process
        process.close()


def gauge(core: EngineCore, name: str) -> float:
    [family] = [family for family in core.registry.snapshot() if family.name == name]
    return family.series[0].value


def test_what_is_computed_from_the_text_is_not_in_a_disguised_recording(tmp_path: Path) -> None:
    """Neither a vector nor the name of a block: with either a guessed prompt could be tested."""
    harness = RecordedHarness(tmp_path / "run")
    prompt = [7, 8, 9, 10, 11, 12, 13, 14, 15]
    harness.submit("text-0", prompt, max_tokens=3)
    client = harness.submit("vector-0", prompt, max_tokens=1, pooling="mean")
    harness.run_until_idle()
    harness.core.receive_from_api(API, QueryKvEvents(99, 1, -1), harness.now_s)
    answers = [m for _, m in harness.core.take_api_messages() if isinstance(m, KvEventsReply)]
    harness.writer.close()
    assert answers[0].events.changes and client.embedding
    content = b"".join(bytes(record) for record in RecordingReader(tmp_path / "run"))
    assert client.embedding not in content
    assert not [name for _, name in answers[0].events.changes if name in content]
    recorded = [m for r in records_of(tmp_path / "run") if isinstance(r, ApiOutboxRecord) for _, m in r.messages]
    [hidden] = [m for m in recorded if isinstance(m, KvEventsReply)]
    assert len(hidden.events.changes) == len(answers[0].events.changes)
    deltas = [delta for m in recorded if isinstance(m, TokenDeltas) for delta in m.deltas]
    assert [len(d.embedding) for d in deltas if d.embedding is not None] == [len(client.embedding)]
    assert replayed(tmp_path / "run").difference is None


def test_an_engine_that_is_started_anew_goes_on_without_a_recording_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened, full = Path.open, Path("/dev/full")
    monkeypatch.setattr(Path, "open", lambda self, mode: opened(full, "wb"))
    with caplog.at_level(logging.WARNING):
        assert recording_file.open_recording(str(tmp_path / "run")) is None
    assert "No space left" in caplog.text


def test_a_disk_that_cannot_follow_ends_the_recording_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The queue is full for good: the engine waits once, briefly, and goes on without a recording."""
    monkeypatch.setattr(recording_file, "CHUNK_BYTES", 100)
    monkeypatch.setattr(recording_file, "MAX_WAIT_S", 0.01)
    monkeypatch.setattr(recording_file.RecordingWriter, "_write_chunks", lambda self: self._file.close())
    monkeypatch.setattr(recording_file, "MAX_QUEUED_CHUNKS", 3)
    with caplog.at_level(logging.WARNING):
        harness = RecordedHarness(tmp_path / "run")
        client = harness.submit("a", [1, 2, 3], max_tokens=200)
        harness.run_until_idle()
        harness.writer.close()
    assert client.tokens == harness.expected(client)
    assert caplog.text.count("recording ended") == 1
    assert harness.writer._chunks.qsize() <= 3


def test_the_innermost_difference_is_shown() -> None:
    one, other = (ApiOutboxRecord([("api", TokenDeltas(1, [TokenDelta("r", 1, 0, [5, t], 2, 0)]))]) for t in (6, 7))
    assert first_difference("messages", one.messages, other.messages) == (
        "messages[0][1].deltas[0].token_ids[1]",
        6,
        7,
    )
    assert first_difference("plan", None, StepPlan(1))[0] == "plan"


def test_the_same_core_without_a_recording_gives_the_same_tokens(tmp_path: Path) -> None:
    recorded = eventful_run(tmp_path / "run")
    for request_id in ("r0-0", "r1-0", "r4-0"):
        client = recorded.clients[request_id]
        assert client.tokens == recorded.expected(client)


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_replays_with_the_same_answers(tmp_path: Path, seed: int) -> None:
    """Nothing that decides an answer lies outside of the recording: no order of a set, no address, no clock."""
    choose = random.Random(seed)
    harness = RecordedHarness(
        tmp_path / "run",
        num_blocks=choose.randrange(20, 40),
        max_num_seqs=choose.randrange(2, 6),
        max_num_batched_tokens=choose.choice([6, 16, 64]),
    )
    for number in range(150):
        match choose.choice(["submit", "plan", "plan", "answer", "answer", "answer", "abort", "crash"]):
            case "submit":
                prompt = [choose.randrange(3) for _ in range(choose.randrange(1, 30))]
                harness.submit(f"r{number}-0", prompt, max_tokens=choose.randrange(1, 40), priority=choose.randrange(3))
            case "plan":
                harness.plan()
            case "answer" if harness.plans:
                harness.answer()
            case "abort" if harness.clients:
                harness.abort(choose.choice(sorted(harness.clients)))
            case "crash" if choose.random() < 0.1:
                harness.crash_worker()
    harness.run_until_idle()
    harness.writer.close()
    outcome = replayed(tmp_path / "run")
    assert outcome.difference is None
    assert outcome.num_answers > 100


def _reworded(tree: Any) -> Any:
    """A recorded message, with the error text that the engine has today for a request that does not fit."""
    match tree:
        case str():
            return re.sub(
                r"(\d+) prompt tokens plus (\d+) output tokens are (\d+) more than the (\d+) that fit here",
                r"max_tokens: \1 prompt tokens and \2 of output exceed the KV pool of \4 tokens by \3",
                tree,
            )
        case list():
            return [_reworded(value) for value in tree]
        case dict():
            return {key: _reworded(value) for key, value in tree.items()}
        case _:
            return tree


def test_a_recording_of_the_schema_before_names_were_changed_is_replayed() -> None:
    reader = RecordingReader(Path(__file__).parent / "recordings" / "schema-5.rec")
    outcome = replay(msgspec.msgpack.encode(_reworded(msgspec.msgpack.decode(record))) for record in reader)
    assert outcome.difference is None and outcome.num_records > 100
    assert outcome.begun.schema_version == 5


def test_the_config_of_an_older_recording_keeps_its_values(tmp_path: Path) -> None:
    harness = RecordedHarness(tmp_path / "new", num_draft_tokens=3)
    harness.writer.close()
    first, *rest = map(bytes, RecordingReader(tmp_path / "new"))
    fields = msgspec.msgpack.decode(first)
    [config] = [one for one in fields if isinstance(one, dict) and "num_draft_tokens" in one]
    config["num_drafts"] = config.pop("num_draft_tokens")
    config["handover_timeout_s"] = config.pop("handoff_timeout_s") + 1.5
    fields[1] = 5
    outcome = replay([msgspec.msgpack.encode(fields), *rest])
    assert outcome.begun.config.num_draft_tokens == 3
    assert outcome.begun.config.handoff_timeout_s == EngineConfig().handoff_timeout_s + 1.5
