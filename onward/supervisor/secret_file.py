"""Checks the mode of a file with a secret. Opens no file."""

import os
import stat

from onward.errors import StartupError

ROOT_UID = 0


def check_secret_file(status: os.stat_result, flag: str, path: str) -> None:
    """Raises `StartupError` if others than the file's owner can read it. A file of root may be readable by its group,
    because Kubernetes mounts a secret that way for a process that is not root (`fsGroup`), and the process cannot
    change the mode."""
    forbidden = stat.S_IRWXO | (stat.S_IWGRP | stat.S_IXGRP if status.st_uid == ROOT_UID else stat.S_IRWXG)
    if status.st_mode & forbidden:
        raise StartupError(f"others can read {flag} {path}; close it to them: chmod 600 {path}")
