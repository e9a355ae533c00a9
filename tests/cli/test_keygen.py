from pathlib import Path

import pytest

from onward.cli.main import run
from onward.supervisor.cluster_key import read_key


def test_keygen_makes_a_key_that_serve_can_read_and_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "key")
    assert run(["keygen", file]) == 0
    said = capsys.readouterr().out
    assert f"--cluster-key-file {file}" in said
    assert read_key(file) not in said
    assert len(read_key(file)) == 64


def test_keygen_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "key"
    file.write_text("precious")
    assert run(["keygen", str(file)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert file.read_text() == "precious"


def test_serve_refuses_a_bad_key_before_it_starts_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "key"
    file.write_text("no key")
    file.chmod(0o600)
    assert run(["serve", "--role", "prefill", "--cluster-key-file", str(file)]) == 1
    assert "is not a cluster key" in capsys.readouterr().err
