"""The table of keys: what it takes, what it refuses and in which words, and whom it finds."""

import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from onward.errors import StartupError
from onward.proto.api_key_entry import ApiKeyEntry
from onward.proto.engine import CallerLimits
from onward.web.auth import api_key_file
from onward.web.auth.api_key_file import ApiKeySource, add_entry, new_key, read_table
from onward.web.auth.api_key_table import (
    ANONYMOUS,
    HASH_PREFIX,
    ApiKeyTable,
    Caller,
    admin_entries,
    hash_key,
    merge_tables,
    parse_table,
    table_text,
)

KEY = "ow-a-key"
HASH = hash_key(KEY)


def entry(name: str = "a", hash: str = HASH, **more: object) -> str:
    lines = [f'name = "{name}"', f'hash = "{hash}"', *(f"{key} = {value}" for key, value in more.items())]
    return "\n".join(["[[key]]", *lines, ""])


def test_a_key_is_found_with_its_role_and_limits_and_no_other_is() -> None:
    text = entry("team", role='"user"', max_in_flight=8, tokens_per_minute=600, priority=-3, max_connections=2)
    keys = ApiKeyTable(parse_table(text + entry("boss", hash_key("other"), role='"admin"'), "f"))
    assert keys.find(KEY) == Caller("team", "user", 8, 600, -3, 2)
    assert keys.find("other") == Caller("boss", "admin")
    assert [keys.find(one) for one in ("", "ow-a-ke", KEY + " ", HASH, "caf\xe9")] == [None] * 5
    found = keys.find(KEY)
    assert found is not None and found.limits == CallerLimits(8, 600) and found.access_filter == "team"
    assert keys.find("other") != ANONYMOUS


def test_a_key_whose_digest_begins_like_a_known_one_is_another() -> None:
    alike = next(one for one in map(str, count()) if hash_key(one)[:12] == HASH[:12])
    assert alike != KEY and len(HASH_PREFIX) + 4 == 12
    assert ApiKeyTable(parse_table(entry(), "f")).find(alike) is None


def test_a_role_is_a_users_unless_the_table_says_otherwise() -> None:
    [told] = parse_table(entry(), "f")
    assert (told.role, told.max_in_flight, told.priority) == ("user", None, None)
    assert Caller("b", "admin").access_filter is None and ANONYMOUS.limits is None


def test_plain_keys_are_admins_with_numbers_for_names() -> None:
    keys = merge_tables(admin_entries(["x", "y"]))
    assert [keys.find(one) for one in "xy"] == [Caller("key-1", "admin"), Caller("key-2", "admin")]
    with pytest.raises(StartupError, match="the key of key-2 is given twice"):
        merge_tables(admin_entries(["x", "x"]))
    with pytest.raises(StartupError, match="the name of key-1 is given twice"):
        merge_tables(admin_entries(["x"]), parse_table(entry("key-1"), "f"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (entry("a") + entry("a", hash_key("b")), r"f: key 2 \(a\): name"),
        (entry("a") + entry("b"), r"f: key 2 \(b\): hash"),
        (entry("a b"), "f: key 1: name"),
        (entry(""), "f: key 1: name"),
        (entry("x" * 65), "f: key 1: name"),
        (f'[[key]]\nhash = "{HASH}"\n', "f: key 1: name"),
        ('[[key]]\nname = "a"\n', r"f: key 1 \(a\): hash: is missing"),
        (entry(hash="blake2b:12"), r"f: key 1 \(a\): hash"),
        (entry(hash=HASH.upper()), r"f: key 1 \(a\): hash"),
        (entry(hash=HASH.removeprefix("blake2b:")), r"f: key 1 \(a\): hash"),
        (entry(role='"root"'), r"f: key 1 \(a\): role"),
        (entry(role='["admin"]'), r"f: key 1 \(a\): role"),
        (entry(max_in_flight=0), r"f: key 1 \(a\): max_in_flight"),
        (entry(max_in_flight="true"), r"f: key 1 \(a\): max_in_flight"),
        (entry(tokens_per_minute="1.5"), r"f: key 1 \(a\): tokens_per_minute"),
        (entry(max_connections='"9"'), r"f: key 1 \(a\): max_connections"),
        (entry(priority=1 << 40), r"f: key 1 \(a\): priority"),
        (entry(rolle='"admin"'), r"f: key 1 \(a\): rolle: is not known"),
        ("keys = []\n", "f: 'keys' is not known"),
        ('key = "k"\n', "f: key must be a list"),
        ("key = [1]\n", "f: key must be a list"),
    ],
)
def test_what_is_wrong_is_named_with_file_entry_and_field(text: str, named: str) -> None:
    with pytest.raises(StartupError, match=named):
        parse_table(text, "f")


@pytest.mark.parametrize(
    "text", [entry(hash="ow-secret"), '[[key]]\nname = "a"\nhash = ow-secret\n', "ow-secret = 1\n["]
)
def test_a_key_that_stands_where_its_hash_should_is_not_shown(text: str) -> None:
    with pytest.raises(StartupError) as told:
        parse_table(text, "f")
    assert "ow-secret" not in told.value.message


def test_an_added_key_works_and_leaves_the_rest_of_the_file_as_it_was(tmp_path: Path) -> None:
    path, key = tmp_path / "keys.toml", new_key()
    [first] = parse_table(entry("first", max_in_flight=3), "f")
    add_entry(path, first)
    path.write_text("# ours\n" + path.read_text())
    [second] = parse_table(entry("second", hash_key(key), role='"admin"'), "f")
    add_entry(path, second)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text().startswith("# ours\n") and read_table(path) == [first, second]
    assert ApiKeySource((), str(path)).read().find(key) == Caller("second", "admin")
    with pytest.raises(StartupError, match=r"key 3 \(first\): name"):
        add_entry(path, first)
    assert read_table(path) == [first, second] and [one.name for one in tmp_path.iterdir()] == ["keys.toml"]


def test_keys_that_are_added_at_the_same_time_are_all_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    entries = [ApiKeyEntry(name=f"team-{index}", digest=f"{index:064x}") for index in range(16)]
    start = threading.Barrier(len(entries))

    def add(one: ApiKeyEntry) -> None:
        start.wait()
        add_entry(path, one)

    with ThreadPoolExecutor(len(entries)) as threads:
        list(threads.map(add, entries))
    assert sorted(one.name for one in read_table(path)) == sorted(one.name for one in entries)
    assert [one.name for one in tmp_path.iterdir()] == ["keys.toml"], "nothing else is left behind"


def test_a_file_that_another_process_is_writing_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_key_file, "MAX_LOCK_ATTEMPTS", 2)
    monkeypatch.setattr(api_key_file, "LOCK_RETRY_S", 0.0)
    path = tmp_path / "keys.toml"
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(StartupError, match="another process"):
        add_entry(path, ApiKeyEntry(name="a", digest="0a" * 32))
    assert not path.exists()
    os.close(holder)
    add_entry(path, ApiKeyEntry(name="a", digest="0a" * 32))
    assert [one.name for one in read_table(path)] == ["a"]


def test_every_key_is_new_and_long() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100 and all(key.startswith("ow-") and len(key) >= 3 + 43 for key in keys)


def test_a_table_reads_as_it_was_written() -> None:
    text = entry("t", role='"admin"', max_in_flight=1, tokens_per_minute=2, priority=-3, max_connections=4)
    [told] = parse_table(text, "f")
    assert parse_table(table_text(told), "f") == [told]


def test_files_that_others_could_write_or_that_lock_nothing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    source = ApiKeySource((), str(path))
    with pytest.raises(StartupError, match=r"--api-keys .* does not exist; make it with `onward keys add"):
        source.read()
    path.write_text("")
    path.chmod(0o600)
    with pytest.raises(StartupError, match="has no key"):
        source.read()
    path.write_bytes(b"\xff")
    with pytest.raises(StartupError, match="UTF-8"):
        source.read()
    path.write_text(entry())
    path.chmod(0o620)
    with pytest.raises(StartupError, match="chmod 600"):
        source.read()
    path.chmod(0o600)
    assert len(source.read()) == 1
    path.write_text("#" * (1 << 20) + "\n")
    with pytest.raises(StartupError, match="larger"):
        source.read()
