"""The same traffic through every wire: what the engine says, and what it plans, is equal byte for byte."""

import random
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onward.proto.engine import FromEngine, TokenDelta, TokenDeltas
from tests.conformance.wires import KINDS, WiredHarness
from tests.engine.traffic import ROUGH, SHAPES, Action, Actor

SHAPE = {"num_blocks": 20, "block_size": 4, "max_num_seqs": 5, "max_num_batched_tokens": 16}


def run_through(kind: str, folder: Path, shape: dict, actions: list[Action]) -> tuple[list[bytes], list[bytes]]:
    """The encoded messages and plans of a run."""
    harness = WiredHarness(kind, folder, **shape)
    try:
        actor = Actor(harness)
        for action in actions:
            actor.act(action)
        harness.start_worker()
        harness.run_until_idle()
        actor.check_clients()
        return harness.sent, [msgspec.msgpack.encode(plan) for plan in harness.all_plans]
    finally:
        harness.close()


def through_every_wire(folder: Path, shape: dict, actions: list[Action]) -> list[bytes]:
    runs = {}
    for kind in KINDS:
        (folder / kind).mkdir()
        runs[kind] = run_through(kind, folder / kind, shape, actions)
    for kind in KINDS[1:]:
        for what, ours, theirs in zip(("message", "plan"), runs[kind], runs[KINDS[0]], strict=True):
            for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                assert one == other, f"{what} {number}: {kind} {msgspec.msgpack.decode(one)}"
    return runs[KINDS[0]][0]


def recorded(seed: int, count: int) -> list[Action]:
    """Long traffic with everything in it, the same for each seed."""
    rng = random.Random(seed)
    kinds = {"submit": 12, "two_steps": 20, "plan": 12, "answer": 12, "abort": 2, "abort_epoch": 1, "abort_by_name": 1}
    kinds |= {"stop": 1, "fail": 2, "resubmit": 2, "repeat": 1, "crash_worker": 1, "crash_engine": 1, "tick": 4}
    kinds |= {"lose_worker": 1, "start_worker": 4, "kill_worker": 1, "lose_worker_and_keep_its_memory": 1}
    drawn = rng.choices(list(kinds), list(kinds.values()), k=count)
    return [(kind, _request(rng) if kind == "submit" else rng.randrange(1000)) for kind in drawn]


def _request(rng: random.Random) -> dict:
    family = rng.randrange(4)
    return {
        "prompt": [(family * 7 + i // 3) % 50 for i in range(rng.randint(1, 40))],
        "max_tokens": rng.randint(1, 30),
        "priority": rng.randrange(3),
        "seed": rng.randrange(4),
        "end": rng.choice([(), (3,), (0, 9, 11)]),
        "min_tokens": rng.randrange(5),
        "cache_salt": rng.choice(["", "salt"]),
        "logprobs": rng.choice([None, 3]),
        "prompt_logprobs": rng.choice([None, 1]),
        "deadline_in_s": rng.choice([None, None, 2.0]),
    }


@pytest.mark.parametrize("seed", range(10))
def test_recorded_traffic_is_answered_alike_on_every_wire(seed: int, tmp_path: Path) -> None:
    messages = through_every_wire(tmp_path, SHAPE, recorded(seed, 300))
    assert len(messages) > 100


@pytest.mark.parametrize("seed", range(4))
def test_recorded_traffic_with_drafts_is_answered_alike_on_every_wire(seed: int, tmp_path: Path) -> None:
    messages = through_every_wire(tmp_path, SHAPE | {"num_draft_tokens": 3}, recorded(seed, 300))
    deltas = [delta for message in map(_deltas, messages) for delta in message]
    assert any(delta.num_draft_tokens and len(delta.token_ids) > 1 for delta in deltas), "some drafts were accepted"
    assert any(delta.num_draft_tokens and len(delta.token_ids) == 1 for delta in deltas), "and some were not"


def _deltas(message: bytes) -> list[TokenDelta]:
    decoded = msgspec.msgpack.decode(message, type=FromEngine)
    return decoded.deltas if isinstance(decoded, TokenDeltas) else []


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(SHAPES, st.lists(ROUGH, min_size=10, max_size=40))
def test_any_traffic_is_answered_alike_on_every_wire(shape: dict, actions: list) -> None:
    with tempfile.TemporaryDirectory() as folder:
        through_every_wire(Path(folder), shape, actions)
