"""The API key comes from a flag, a file or the environment, and shows on no command line that we write."""

import argparse
from pathlib import Path

import pytest

from onward.cli.admin_client import add_arguments, admin_client_from_args
from onward.cli.api_keys import api_key_from_args
from onward.cli.main import run
from onward.errors import StartupError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONWARD_API_KEY", raising=False)


def given(api_key: str | None = None, api_key_file: str | None = None) -> str | None:
    return api_key_from_args(argparse.Namespace(api_key=api_key, api_key_file=api_key_file))


def key_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "api.key"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_what_is_said_counts_more_than_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert given() is None
    monkeypatch.setenv("ONWARD_API_KEY", "from-environment")
    assert given() == "from-environment"
    assert given("from-flag") == "from-flag"
    assert given(None, key_file(tmp_path, "from-file\nmore\n")) == "from-file"


@pytest.mark.parametrize(
    ("text", "mode", "named"), [("k", 0o644, "chmod 600"), ("", 0o600, "no key"), ("\u00e4", 0o600, "no key")]
)
def test_a_file_that_is_no_secret_or_has_none_is_refused(tmp_path: Path, text: str, mode: int, named: str) -> None:
    with pytest.raises(StartupError, match=named):
        given(None, key_file(tmp_path, text, mode))


def test_a_file_that_is_not_there_and_two_keys_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--api-key-file"):
        given(None, str(tmp_path / "nothing"))
    with pytest.raises(StartupError, match="both"):
        given("k", key_file(tmp_path, "k"))


def test_status_and_drain_show_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, "a server")
    monkeypatch.setenv("ONWARD_API_KEY", "from-environment")
    assert admin_client_from_args(parser.parse_args(["http://127.0.0.1:1"])).api_key == "from-environment"


def test_the_router_takes_its_key_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONWARD_API_KEY", " ")
    assert run(["router", "--port", "0"]) == 1
    assert "--api-key must not be empty" in capsys.readouterr().err
