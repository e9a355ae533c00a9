import os
import stat
from pathlib import Path

import pytest

from onward.errors import StartupError
from onward.supervisor.cluster_key import new_key, read_key, write_key


def test_a_written_key_can_be_read_and_only_by_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "key"
    before = os.umask(0)
    try:
        write_key(file)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(bytes.fromhex(read_key(str(file)))) == 32


def test_no_file_is_no_key_and_no_two_keys_are_equal() -> None:
    assert read_key(None) == ""
    assert new_key() != new_key()


def test_an_existing_file_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "key"
    write_key(file)
    key = read_key(str(file))
    with pytest.raises(StartupError, match="exists already"):
        write_key(file)
    assert read_key(str(file)) == key


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "0 hex digits"),
        (b"ab" * 31, "62 hex digits"),
        (b"ab" * 33, "66 hex digits"),
        (b"zz" * 32, "characters"),
        (b"\xff" * 64, "characters"),
        (b"ab" * 4000, "hex digits"),
    ],
)
def test_a_file_that_holds_no_key_is_named(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(StartupError, match=f"{file}.*{why}"):
        read_key(str(file))


def test_a_missing_file_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=f"onward keygen {tmp_path}/key"):
        read_key(str(tmp_path / "key"))
    with pytest.raises(StartupError, match="directory"):
        read_key(str(tmp_path))


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620])
def test_a_key_that_others_can_touch_is_refused_with_the_command_that_mends_it(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    write_key(file)
    file.chmod(mode)
    with pytest.raises(StartupError, match=f"chmod 600 {file}"):
        read_key(str(file))
