from pathlib import Path

import pytest

import onward
from benchmarks.api.api_stages import OTHER, STAGES, FunctionSamples, shares, stage_of

ROOT = Path(onward.__file__).parents[1]
OF_A_TOKEN = [
    "onward/api/engine_link/request_tracker.py",
    "onward/api/engine_link/engine_client.py",
    "onward/text/detokenizer.py",
    "onward/api/lifecycle/chunk_encoder.py",
    "onward/api/lifecycle/generation_runner.py",
    "uvicorn/protocols/http/httptools_impl.py",
    "onward/web/request_id_middleware.py",
    "asyncio/runners.py",
]
OURS = [part for _, parts in STAGES for part in parts if part.startswith("/onward/")]


def test_every_part_of_a_tokens_way_has_a_stage_of_its_own() -> None:
    stages = {stage_of(f"/somewhere/{file}") for file in OF_A_TOKEN}
    assert len(stages) == len(OF_A_TOKEN) and OTHER not in stages
    assert stage_of("/usr/lib/python3.11/json/decoder.py") == OTHER


@pytest.mark.parametrize("part", [*OURS, *(f"/{file}" for file in OF_A_TOKEN if file.startswith("onward/"))])
def test_every_part_of_ours_that_a_stage_names_is_there(part: str) -> None:
    place = ROOT / part.strip("/")
    assert place.is_dir() if part.endswith("/") else place.is_file()


def test_shares_are_of_the_whole_and_the_largest_comes_first() -> None:
    samples = [
        FunctionSamples("/x/onward/api/lifecycle/chunk_encoder.py", "f", 2),
        FunctionSamples("/x/onward/api/engine_link/request_tracker.py", "g", 5),
        FunctionSamples("/x/onward/api/lifecycle/stream_formatters.py", "h", 2),
        FunctionSamples("/y", "i", 1),
    ]
    found = shares(samples)
    assert list(found.values()) == pytest.approx([0.5, 0.4, 0.1])
    assert list(found)[1:] == [stage_of("/x/onward/api/lifecycle/chunk_encoder.py"), OTHER]
