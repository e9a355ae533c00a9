"""What holds for every test: signals mean what they mean in a terminal, files that take long begin first, and the garbage
collector looks at no more than a file's own objects."""

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

LONGEST_FIRST = (
    "e2e/test_rollout.py",
    "e2e/test_installed_wheel.py",
    "e2e/test_chaos.py",
    "docs/test_commands.py",
    "engine/test_core_properties.py",
    "e2e/test_pd_crashes.py",
    "sim/test_seeds.py",
    "e2e/test_router.py",
    "e2e/test_pressure.py",
    "e2e/test_pd_serving.py",
    "e2e/test_pd_limits.py",
    "api/test_cut_messages.py",
    "e2e/test_crashes.py",
    "api/responses/test_cuts.py",
    "worker/speculation/test_default_model.py",
    "models/test_decoder_default_model.py",
    "e2e/test_speculation.py",
    "e2e/test_observability.py",
    "api/test_attempts.py",
    "api/responses/test_behind_router.py",
    "e2e/test_drafts_of_models.py",
    "e2e/test_kept_memory_of_peers.py",
    "e2e/test_nothing_remains.py",
    "engine/test_admission_properties.py",
)
"""The process that begins one of them last runs it alone: one process runs a whole file. All other files are short."""

_PLACES = {Path(__file__).parent.joinpath(name).resolve(strict=True): place for place, name in enumerate(LONGEST_FIRST)}


def pytest_configure() -> None:
    # A shell that starts a run in the background has it ignore SIGINT, and so would every process that a test starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _PLACES.get(item.path, len(_PLACES)))


@pytest.fixture(autouse=True, scope="module")
def earlier_objects_are_no_garbage() -> Iterator[None]:
    """Thousands of collected tests and the packages that they import are millions of objects, which a full collection
    takes a second to look at. Simulated runs, and a few tests, collect often."""
    gc.collect()
    gc.freeze()
    yield
