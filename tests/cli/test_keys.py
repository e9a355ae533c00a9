"""`onward keys`, and what servers want to have of keys before they start."""

from pathlib import Path

import pytest

from onward.cli.api_keys import check_exposure, exposure_warnings, key_source_from_config
from onward.cli.main import run
from onward.config import RouterConfig, ServeConfig
from onward.errors import StartupError
from onward.web.auth.api_key_file import ApiKeySource, read_table
from onward.web.auth.api_key_table import ApiKeyTable, Caller, admin_entries, merge_tables

SOME_KEYS = merge_tables(admin_entries(["k"]))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONWARD_API_KEY", raising=False)


def test_a_key_is_printed_once_and_the_file_has_its_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    assert run(["keys", "add", str(path), "team-a", "--max-in-flight", "8", "--priority", "-2"]) == 0
    told = capsys.readouterr()
    key = told.out.strip()
    assert key.startswith("ow-") and key not in told.err and key not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert run(["keys", "add", str(path), "boss", "--role", "admin"]) == 0
    capsys.readouterr()
    assert ApiKeySource((), str(path)).read().find(key) == Caller("team-a", "user", 8, None, -2)
    assert run(["keys", "list", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "team-a" in shown and "admin" in shown and all(entry.digest not in shown for entry in read_table(path))


def test_a_removed_key_is_gone_and_the_others_and_all_comments_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    for name in ("first", "second", "third"):
        assert run(["keys", "add", str(path), name]) == 0
    keys = [entry for entry in read_table(path) if entry.name != "second"]
    text = "# all tenants\n" + path.read_text().replace(
        '\n[[key]]\nname = "third"', '\n# paid\n[[key]]\nname = "third"'
    )
    path.write_text(text.replace("[[key]]", "  [[ key ]] # one", 1))
    assert run(["keys", "remove", str(path), "second"]) == 0
    assert "SIGHUP" in capsys.readouterr().err
    assert read_table(path) == keys
    assert path.read_text().startswith("# all tenants\n  [[ key ]] # one\n")
    assert "\n# paid\n[[key]]\n" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_last_key_and_an_unknown_one_are_not_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    assert run(["keys", "add", str(path), "only"]) == 0
    before = path.read_text()
    for name, problem in (("only", "the only key"), ("other", "no key of the name other")):
        capsys.readouterr()
        assert run(["keys", "remove", str(path), name]) == 1
        assert problem in capsys.readouterr().err
        assert path.read_text() == before


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["a b"], "name"),
        (["taken"], r"key 2 (taken): name"),
        (["a", "--max-in-flight", "0"], "max_in_flight"),
        (["a", "--tokens-per-minute", "-1"], "tokens_per_minute"),
    ],
)
def test_what_cannot_be_added_is_named_and_leaves_the_file_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], named: str
) -> None:
    path = tmp_path / "keys.toml"
    assert run(["keys", "add", str(path), "taken"]) == 0
    before = path.read_text()
    capsys.readouterr()
    assert run(["keys", "add", str(path), *flags]) == 1
    told = capsys.readouterr()
    assert named in told.err and not told.out and path.read_text() == before
    assert run(["keys", "list", str(tmp_path / "nothing")]) == 1


def test_keys_come_from_flags_and_files_together_and_else_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, secret = tmp_path / "keys.toml", tmp_path / "key"
    run(["keys", "add", str(table), "team"])
    secret.write_text("from-file\n")
    secret.chmod(0o600)
    monkeypatch.setenv("ONWARD_API_KEY", "from-environment")
    for kind in (ServeConfig, RouterConfig):
        assert [one.name for one in key_source_from_config(kind()).read().entries] == ["key-1"]
        assert key_source_from_config(kind()).read().find("from-environment") == Caller("key-1", "admin")
        keys = key_source_from_config(kind(api_key=("a", "b"), api_key_file=str(secret), api_keys=str(table))).read()
        assert [one.name for one in keys.entries] == ["key-1", "key-2", "key-3", "team"]
        assert keys.find("from-file") == Caller("key-3", "admin") and keys.find("from-environment") is None
        assert not key_source_from_config(kind(api_keys=str(table))).read().find("from-environment")
    monkeypatch.setenv("ONWARD_API_KEY", "")
    assert not len(key_source_from_config(ServeConfig()).read())


@pytest.mark.parametrize("key", [" ", "", "ключ", "a\nb", " a"])
def test_what_cannot_travel_in_a_header_is_no_key(key: str) -> None:
    with pytest.raises(StartupError, match="--api-key"):
        key_source_from_config(RouterConfig(api_key=(key,)))


@pytest.mark.parametrize("command", ["serve", "router"])
def test_nobody_listens_beyond_this_machine_without_keys_by_accident(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cluster_key = tmp_path / "cluster"
    assert run(["keygen", str(cluster_key)]) == 0
    flags = ["--host", "0.0.0.0", "--port", "0", "--cluster-key-file", str(cluster_key)]
    capsys.readouterr()
    assert run([command, *flags]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "--host 0.0.0.0" in told and "--insecure" in told and "--api-keys" in told


def test_who_says_insecure_or_has_keys_or_stays_here_is_let_through() -> None:
    for kind in (ServeConfig, RouterConfig):
        check_exposure(kind(), ApiKeyTable())
        check_exposure(kind(host="0.0.0.0", insecure=True), ApiKeyTable())
        check_exposure(kind(host="0.0.0.0", cluster_key_file="k"), SOME_KEYS)
        assert "--insecure" in exposure_warnings(kind(host="0.0.0.0", insecure=True), ApiKeyTable())[0]
        assert "--tls-cert" in exposure_warnings(kind(host="0.0.0.0"), SOME_KEYS)[0]
        assert not exposure_warnings(kind(host="0.0.0.0", tls_cert="c", tls_key="k"), SOME_KEYS)
        assert not exposure_warnings(kind(), ApiKeyTable())


@pytest.mark.parametrize("config", [ServeConfig(router="http://127.0.0.1:8080"), RouterConfig()])
def test_with_keys_a_router_and_its_instances_need_a_secret(config: ServeConfig | RouterConfig) -> None:
    check_exposure(config, ApiKeyTable())
    with pytest.raises(StartupError, match="--cluster-key-file"):
        check_exposure(config, SOME_KEYS)
    check_exposure(ServeConfig(), SOME_KEYS)
    check_exposure(RouterConfig(instances="http://127.0.0.1:8000"), SOME_KEYS)


@pytest.mark.parametrize("command", ["serve", "router"])
def test_a_certificate_that_cannot_be_read_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--port", "0", "--tls-cert", "/nothing", "--tls-key", "/nothing"]) == 1
    assert capsys.readouterr().err == f"onward {command}: cannot read --tls-cert /nothing: No such file or directory\n"
