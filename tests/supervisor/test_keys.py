"""The supervisor reads the keys again when it is told to, and tells its api processes."""

import dataclasses
import logging
from pathlib import Path

import pytest

from onward.config import ServeConfig
from onward.proto.control import UpdateApiKeys
from onward.supervisor.children import ProcessRole
from onward.web.auth.api_key_file import ApiKeySource
from onward.web.auth.api_key_table import table_text
from tests.supervisor.stand_ins import child_of, supervisor_of
from tests.web import route_access


def write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)


def test_new_keys_are_told_to_every_api_process_and_a_broken_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.toml"
    first, second, _ = route_access.entries()
    write(path, table_text(first))
    with (
        caplog.at_level(logging.INFO, "onward.audit"),
        supervisor_of(ServeConfig(), key_source=ApiKeySource((), str(path))) as supervisor,
    ):
        told = [child_of(supervisor, ProcessRole.API, f"api-{index}")[1] for index in range(2)]
        write(path, table_text(first) + table_text(second))
        supervisor._reload_keys()
        assert [channel.receive() for channel in told] == [UpdateApiKeys([first, second])] * 2
        write(path, "[[key]]\n")
        supervisor._reload_keys()
        assert [channel.receive() for channel in told] == [None, None]
        assert supervisor._api_start_message("late", 2).keys == [first, second]
        for channel in told:
            channel.close()
    lines = [record.getMessage() for record in caplog.records if record.name == "onward.audit"]
    assert lines[0] == "audit caller=signal action=reload_keys targets=2"
    assert f"{path}: key 1: name" in lines[1] and "refused=" in lines[1]


def test_a_key_of_the_command_line_is_not_among_what_api_processes_show() -> None:
    config = ServeConfig(api_key=("ow-secret",))
    with supervisor_of(config, key_source=ApiKeySource(config.api_key)) as supervisor:
        start = supervisor._api_start_message("api", 0)
        assert [key.name for key in start.keys] == ["key-1"]
        assert "ow-secret" not in repr(start)
        shown = start.config.serve_config.keys() - {"handoff_address"}
        assert shown == {field.name for field in dataclasses.fields(ServeConfig)} - {"api_key"}, "all others are"
