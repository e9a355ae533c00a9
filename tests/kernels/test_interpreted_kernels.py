"""Triton kernels of models that are not plain Llamas, in Triton's interpreter: right, and a row has the same bits in chunks
cut anywhere, decoding, and shared among programs. Needs no device; `test_families_on_device.py` uses one."""

import functools
import json
import os
import subprocess
import sys

import pytest

from tests.kernels.interpreted_kernels import ATTENTION, BROKEN

LIMIT = 2e-6


def run(*rule: str) -> dict[str, tuple[float, int]]:
    """The largest error and the elements that differ, by name."""
    command = [sys.executable, "-m", "tests.kernels.interpreted_kernels", *rule]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: (error, differing) for name, (error, differing) in json.loads(done.stdout).items()}


@functools.cache
def results() -> dict[str, tuple[float, int]]:
    return run()


def test_interpreted_kernels_give_what_float64_gives() -> None:
    assert results().keys() > ATTENTION.keys()
    assert {name: error for name, (error, _) in results().items() if not error < LIMIT} == {}


def test_interpreted_attention_has_the_same_bits_in_chunks_and_decoding_with_windows_caps_and_sinks() -> None:
    assert {name: differing for name, (_, differing) in results().items() if differing} == {}


@pytest.mark.full
@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_of_attention_is_noticed(rule: str) -> None:
    found = run(rule)
    assert any(error > 100 * LIMIT or differing for error, differing in found.values())
