import pytest

from onward.bench.api_stages import OTHER, SOCKETS, FunctionTime, Profile, dearest, shares, stage_of


def took(file: str, own_s: float) -> FunctionTime:
    return FunctionTime(file, "f", 1, own_s)


def test_every_part_of_a_tokens_way_has_a_stage() -> None:
    stages = {stage_of(f"/somewhere/{file}") for file in (
        "onward/api/ledger.py", "onward/api/engine_client.py", "onward/text/detokenizer.py", "onward/api/chunks.py",
        "onward/api/generation.py", "uvicorn/protocols/http/httptools_impl.py",
    )}  # fmt: skip
    assert len(stages) == 6 and OTHER not in stages
    assert stage_of("/usr/lib/python3.11/json/decoder.py") == OTHER


def test_shares_are_of_the_whole_and_what_no_function_took_is_the_loops_and_the_sockets() -> None:
    profile = Profile(
        10.0, [took("/x/onward/api/chunks.py", 1.0), took("/x/onward/api/cursors.py", 2.0), took("/y", 1.0)]
    )
    found = shares(profile)
    assert next(iter(found)) == SOCKETS and found[SOCKETS] == pytest.approx(0.6)
    assert found[stage_of("/x/onward/api/chunks.py")] == pytest.approx(0.3)
    assert sum(found.values()) == pytest.approx(1.0)


def test_a_profile_that_says_more_than_the_clock_leaves_nothing_to_the_sockets() -> None:
    assert shares(Profile(1.0, [took("/y", 2.0)]))[SOCKETS] == 0.0


def test_the_dearest_functions_come_first() -> None:
    functions = [took("a", 1.0), took("b", 3.0), took("c", 2.0)]
    assert [one.file for one in dearest(functions, 2)] == ["b", "c"]
