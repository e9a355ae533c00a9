"""docs/models.md says what the tests serve. `python -m tests.models.models_page` writes its tables anew."""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from onward.kernels.weight_formats import FORMATS
from onward.models.checkpoint_quantization import COMPRESSED_LAYOUTS, METHODS
from onward.models.families import registry
from onward.models.families.registry import BY_ARCHITECTURE, BY_HF_NAME
from onward.models.loader.gguf_file import is_readable
from onward.models.loader.safetensors_header import FLOAT_TYPES
from tests.models import family_models, models_page

ADDING = Path(__file__).resolve().parents[2] / "docs/adding-a-model.md"


def test_the_table_of_families_is_that_of_the_devices() -> None:
    assert models_page.tables_in(models_page.PAGE.read_text())["families"] == models_page.families_table()


def test_the_accuracies_are_those_that_are_measured() -> None:
    """Within a point: the float side goes through torch, and its last bits differ between machines."""
    table = models_page.tables_in(models_page.PAGE.read_text())["accuracy"]
    written = {name: float(percent) for name, percent in re.findall(r"^\| (\w+) \| (\d+) % \|$", table, re.MULTILINE)}
    assert list(written) == list(BY_ARCHITECTURE)
    for architecture, percent in written.items():
        assert models_page.int8_error_percent(architecture) == pytest.approx(percent, abs=1.0), architecture


def test_the_page_lists_every_type_of_stored_tensors() -> None:
    page = models_page.PAGE.read_text()
    section = page[page.index("## Formats of weights") : page.index("## Memory of models")]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    types = {name for row in rows[2:] for name in re.findall(r"\w+", row[1])}
    assert {kind.name for kind in gguf.GGMLQuantizationType} <= types
    assert {*FLOAT_TYPES, "I32", "I8", "F8_E4M3", "U8"} <= types
    refused = {name for row in rows if row[2].strip() == "refused" for name in re.findall(r"\w+", row[1])}
    assert refused == {kind.name for kind in gguf.GGMLQuantizationType if not is_readable(kind)}
    for name in (*FORMATS, *METHODS, *COMPRESSED_LAYOUTS, *BY_HF_NAME):
        assert name in page, name


def test_the_example_of_a_new_family_works_and_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code is run, as the page has it, against transformers."""
    [code] = re.findall(r"```python\n(.*?)```", ADDING.read_text(), re.DOTALL)
    assert len(code.splitlines()) < 60
    scope: dict[str, Any] = {}
    exec(code, scope)
    [family] = scope["FAMILIES"]
    monkeypatch.setitem(registry.BY_HF_NAME, family.hf_name, family)
    monkeypatch.setitem(registry.BY_ARCHITECTURE, family.architecture, family)
    monkeypatch.setitem(
        family_models.CASES,
        "starcoder2",
        ("Starcoder2", {"head_dim": None, "sliding_window": family_models.WINDOW, "norm_epsilon": 1e-4}),
    )
    model = family_models.make("starcoder2")
    expected = model.their_logits(np.random.default_rng(3).integers(0, model.config.vocab_size, 90).tolist())
    ours = family_models.logits_of("starcoder2", "float32")
    assert np.abs(ours - expected).max() < 1e-4 * np.abs(expected).max()
