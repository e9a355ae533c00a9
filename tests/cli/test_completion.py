"""`onward completion`: the scripts, and what bash makes of one; and `python -m onward`."""

import argparse
import subprocess
import sys

import pytest

from onward.cli.completion import SHELLS, completion_script
from onward.cli.main import COMMANDS, build_parser, run
from onward.version import __version__

COMPLETE = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_shtab_onward
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(script: str, *words: str) -> set[str]:
    """What bash offers for the last word."""
    command = ["bash", "--norc", "-c", COMPLETE, "bash", "/dev/stdin", *words]
    ended = subprocess.run(command, input=script, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return set(ended.stdout.split())


@pytest.fixture(scope="module")
def bash_script() -> str:
    return completion_script("bash")


def test_bash_completes_commands(bash_script: str) -> None:
    assert completed(bash_script, "onward", "s") == {name for name in COMMANDS if name.startswith("s")}


def test_bash_completes_flags_and_their_values(bash_script: str) -> None:
    assert completed(bash_script, "onward", "serve", "--max-num-") == {"--max-num-seqs", "--max-num-batched-tokens"}
    assert completed(bash_script, "onward", "serve", "--role", "") == {"mixed", "prefill", "decode"}
    assert completed(bash_script, "onward", "keys", "add", "--ro") == {"--role"}


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_has_every_command_and_every_long_flag(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    _, parsers = build_parser(COMMANDS)
    flags = {flag for parser in parsers.values() for flag in parser.known_flags() if flag.startswith("--")}
    flags -= {"--help"}
    assert len(flags) > 100
    # fish writes a flag without its dashes.
    written = {flag.removeprefix("--") if shell == "fish" else flag for flag in flags}
    assert not [word for word in (*COMMANDS, *written) if word not in script]


def test_an_unknown_shell_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["completion", "powershell"])
    assert "powershell" in capsys.readouterr().err


def test_arguments_of_a_command_are_declared_only_where_they_are_asked_for() -> None:
    _, parsers = build_parser(["serve"])
    assert "--model" in parsers["serve"].known_flags()
    assert "--policy" not in parsers["router"].known_flags()
    assert all(isinstance(parser, argparse.ArgumentParser) for parser in parsers.values())


def test_the_package_is_a_command_too() -> None:
    ended = subprocess.run([sys.executable, "-m", "onward", "--version"], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.strip()) == (0, __version__)
    ended = subprocess.run([sys.executable, "-m", "onward", "serv"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and ended.stderr.startswith("onward: there is no command serv (did you mean serve?)")
