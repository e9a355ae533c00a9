"""A short run of every target, always the same one, and every input that has ever failed. The long run: `make fuzz`."""

from pathlib import Path

import msgspec
import pytest

from tests.fuzz.case import CORPUS, Target, TooSlow, ended_after
from tests.fuzz.mutation import byte_cases, cases
from tests.fuzz.run import fuzz
from tests.fuzz.targets import TARGETS

NUM_CASES = 60


@pytest.mark.parametrize("name", TARGETS)
def test_every_case_is_taken_or_cleanly_refused(name: str) -> None:
    outcome = fuzz(TARGETS[name], NUM_CASES, seed=1)
    assert outcome.finding is None, outcome.finding
    assert 0 < outcome.num_taken < outcome.num_cases, "cases get in, and cases do not"


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*.bin")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_has_failed_once_fails_no_more(path: Path) -> None:
    TARGETS[path.parent.name].check(path.read_bytes())


def test_the_fuzzer_finds_a_receiver_that_forgets_one_way_to_fail() -> None:
    decoder = msgspec.msgpack.Decoder(list[str])
    seeds = [["a", "b"]]
    target = Target(
        "sabotaged",
        cases(seeds, msgspec.msgpack.encode),
        lambda data: decoder.decode(data) and None,
        (msgspec.DecodeError,),
    )
    found = fuzz(target, 20_000, seed=0).finding
    assert found is not None and "UnicodeDecodeError" in found.fault


def test_the_fuzzer_finds_an_endless_case() -> None:
    def run(data: bytes) -> None:
        while data == b"ab":
            continue

    target = Target("endless", byte_cases([b"ab"]), run, ())
    with pytest.raises(TooSlow), ended_after(0.05):
        target.run(b"ab")
