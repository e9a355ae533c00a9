"""A secret may be read by its owner, and by the group of a file that root has put there."""

import os
from pathlib import Path

import pytest

from onward.errors import StartupError
from onward.supervisor.secret_file import check_secret_file


def status_of(mode: int, uid: int) -> os.stat_result:
    return os.stat_result((mode, 1, 1, 1, uid, 10001, 64, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "uid", "is_secret"),
    [
        (0o100600, 1000, True),
        (0o100400, 1000, True),
        (0o100440, 1000, False),
        (0o100604, 1000, False),
        (0o100400, 0, True),
        (0o100440, 0, True),  # a volume of Kubernetes with fsGroup
        (0o100640, 0, True),
        (0o100660, 0, False),
        (0o100444, 0, False),
        (0o100604, 0, False),
    ],
)
def test_only_root_may_open_a_secret_to_a_group(mode: int, uid: int, is_secret: bool) -> None:
    if is_secret:
        check_secret_file(status_of(mode, uid), "--cluster-key-file", "key")
        return
    with pytest.raises(StartupError, match="others can read --cluster-key-file key; close it to them: chmod 600 key"):
        check_secret_file(status_of(mode, uid), "--cluster-key-file", "key")


def test_a_real_file_is_judged_by_its_own_mode(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret")
    file.chmod(0o604)
    with pytest.raises(StartupError):
        check_secret_file(file.stat(), "--api-key-file", str(file))
    file.chmod(0o600)
    check_secret_file(file.stat(), "--api-key-file", str(file))
