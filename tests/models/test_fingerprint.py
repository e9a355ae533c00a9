from pathlib import Path

import pytest

from onward.models import fingerprint
from onward.models.fingerprint import instruction_set, numerics_fingerprint

BASE = {"weights_sha256": "aa", "scheme": "none", "dtype": "float32", "tensor_parallel": 1}


def test_equal_facts_give_equal_fingerprints() -> None:
    assert numerics_fingerprint(**BASE) == numerics_fingerprint(**BASE)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "change", [{"weights_sha256": "bb"}, {"scheme": "int8"}, {"dtype": "bfloat16"}, {"tensor_parallel": 2}]
)
def test_each_fact_changes_the_fingerprint(change: dict[str, object]) -> None:
    assert numerics_fingerprint(**(BASE | change)) != numerics_fingerprint(**BASE)  # pyright: ignore[reportArgumentType]


def test_another_version_of_the_kernels_changes_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    before = numerics_fingerprint(**BASE)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(fingerprint, "KERNEL_VERSION", fingerprint.KERNEL_VERSION + 1)
    assert numerics_fingerprint(**BASE) != before  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("scheme", "is_equal"), [("int8-g32", True), ("none", False)])
def test_the_version_of_torch_counts_where_torch_computes(
    scheme: str, is_equal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprint_now() -> str:
        return numerics_fingerprint(weights_sha256="aa", scheme=scheme, dtype="float32")

    before = fingerprint_now()
    (tmp_path / "torch-0.0.1.dist-info").mkdir()
    (tmp_path / "torch-0.0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert (fingerprint_now() == before) is is_equal


def test_the_instruction_set_names_the_machine() -> None:
    assert instruction_set().strip()
