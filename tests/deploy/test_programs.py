"""What nginx, systemd, zsh and fish say of our files. Each is taken from PATH, or from Debian's packages without root."""

import os
import sys
from pathlib import Path

import pytest

from onward.cli.completion import completion_script
from tests.deploy.debian_programs import find_program
from tests.deploy.manifests import DEPLOY, UNITS
from tests.web import certificate

pytestmark = pytest.mark.full


def test_nginx_takes_its_configuration(tmp_path: Path) -> None:
    cert, key = certificate.make(tmp_path)
    text = (DEPLOY / "nginx" / "nginx.conf").read_text()
    for place, file in (("/etc/nginx/tls/onward.crt", cert), ("/etc/nginx/tls/onward.key", key)):
        assert place in text
        text = text.replace(place, file)
    file = tmp_path / "nginx.conf"
    file.write_text(f"pid {tmp_path}/pid;\nerror_log {tmp_path}/log;\n{text}")
    for name in ("body", "proxy", "fastcgi", "uwsgi", "scgi"):
        (tmp_path / name).mkdir()
    ended = find_program("nginx", "nginx", "nginx-common").run("-t", "-c", str(file), "-p", str(tmp_path))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_takes_its_units(unit: Path, tmp_path: Path) -> None:
    """With a program that exists here in the place of /opt/onward/bin/onward."""
    program = tmp_path / "onward"
    program.write_text(f"#!{sys.executable}\n")
    program.chmod(0o755)
    file = tmp_path / unit.name
    file.write_text(unit.read_text().replace("/opt/onward/bin/onward", str(program)))
    analyze = find_program("systemd-analyze", "systemd", "libsystemd-shared")
    ended = analyze.run("verify", "--man=no", "--recursive-errors=no", str(file))
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("shell", "flags", "packages"),
    [
        ("zsh", ("-n",), ("zsh", "zsh-common")),
        ("fish", ("--no-execute",), ("fish", "fish-common", "libpcre2-32-0")),
    ],
)
def test_shells_can_read_their_completion_scripts(
    shell: str, flags: tuple[str, ...], packages: tuple[str, ...], tmp_path: Path
) -> None:
    script = tmp_path / f"onward.{shell}"
    script.write_text(completion_script(shell))
    program = find_program(shell, *packages)
    ended = program._replace(environment=program.environment | {"HOME": os.fspath(tmp_path)}).run(*flags, str(script))
    assert ended.returncode == 0, ended.stderr
