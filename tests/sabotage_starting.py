"""Deliberate bugs in what a start needs, measures and says, and the tests that notice."""

from onward import extras
from onward.models import fingerprint
from tests.sabotage_kinds import Patches, Sabotage

TORCHLESS = "tests/e2e/test_without_torch.py::"


def _look_for_no_package(patch: Patches) -> None:
    patch.put(extras, "find_spec", lambda name: name)


def _torch_in_every_fingerprint(patch: Patches) -> None:
    patch.put(fingerprint, "_libraries", lambda device, scheme: ("torch", "numba", "numpy"))


TABLE = [
    Sabotage(
        "packages-not-checked",
        "a flag that needs torch fails where torch is imported, with a traceback",
        _look_for_no_package,
        [TORCHLESS + "test_a_gguf_file_of_floats_is_refused_when_its_header_is_read"],
    ),
    Sabotage(
        "torch-in-every-fingerprint",
        "two int8 instances, one with torch and one without, do not exchange KV",
        _torch_in_every_fingerprint,
        ["tests/models/test_fingerprint.py::test_the_version_of_torch_counts_where_torch_computes[int8-g32-True]"],
    ),
]
