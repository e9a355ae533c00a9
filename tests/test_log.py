"""One event is one line, whatever its values are: a value cannot start a line or a field of its own."""

import json
import logging
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward import log
from onward.web.auth import audit_log
from onward.web.auth.api_key_table import Caller

FORGED = "i-1\n2026-01-01 00:00:00,000 api-0      INFO    audit caller=ops action=drain targets=1"
BREAKS = ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]


def field_in(line: str) -> str:
    """The value of the only field, as a reader of the log takes it."""
    name, _, value = line.partition(" id=")
    assert name == "seen"
    return value[1:-1].encode("latin-1", "backslashreplace").decode("unicode_escape") if value[:1] == '"' else value


def test_plain_values_stand_as_they_are_and_texts_in_quotes() -> None:
    assert log.event("worker lost", pid=3, cause="signal 9", s=0.25) == 'worker lost pid=3 cause="signal 9" s=0.250'
    assert log.event("x", who="é", places=[1], none=None) == "x who=é places=[1] none=None"


@pytest.mark.parametrize("line_break", BREAKS, ids=ascii)
def test_a_line_break_in_a_value_begins_no_line(line_break: str) -> None:
    line = log.event("seen", id=f"a{line_break}audit caller=ops")
    assert len(line.splitlines()) == 1 and line_break not in line


def test_a_quote_in_a_value_ends_no_field() -> None:
    line = log.event("seen", id='a" caller="ops')
    assert line == r'seen id="a\" caller=\"ops"'
    assert shlex.split(line) == ["seen", 'id=a" caller="ops']
    assert log.event("seen", id='"a"') == r'seen id="\"a\""'
    assert log.event("seen", id="a b\\") == r'seen id="a b\\"'


def test_a_terminal_s_control_characters_are_escaped() -> None:
    line = log.event("seen", id="\x1b[2J\x00\x7f\x9b\t")
    assert line.isprintable() and line == r'seen id="\x1b[2J\x00\x7f\x9b\t"'


@given(st.text())
def test_any_text_is_one_line_and_can_be_read_back(text: str) -> None:
    line = log.event("seen", id=text)
    assert line.isprintable()
    assert field_in(line) == text


def test_an_instance_s_id_forges_no_audit_line(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        log.configure("router")
        logging.getLogger("onward.test").warning(log.event("instance registered", instance=FORGED))
        logging.getLogger("onward.test").warning("text of another library: %s", FORGED)
        try:
            raise ValueError(FORGED)
        except ValueError:
            logging.getLogger("onward.test").exception("a fault of ours")
        audit_log.log_action(Caller("ops", "admin"), "drain", 1)
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    lines = capsys.readouterr().err.splitlines()
    events = [line for line in lines if not line.startswith("    ")]
    assert len(events) == 4, lines
    assert [line for line in events if re.match(r"\S+ \S+ \S+ +\w+ +audit ", line)] == [events[-1]]


LOGGED = "import logging; from onward import log; log.configure('api-0'); logging.getLogger().info('engine up')"


def test_on_a_terminal_a_line_replaces_the_progress_bar_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(ours, "rb", buffering=0) as terminal, os.fdopen(theirs, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        stderr.write("warming up 0:00:12")
        log.configure("api-0", logging.getLevelName(root.level))
        root.handlers[0].handle(logging.makeLogRecord({"msg": "engine up", "levelname": "INFO"}))
        shown = terminal.read(4096)
    assert re.fullmatch(rb"warming up 0:00:12\r\x1b\[2K[^\r\n]+ engine up\r\n", shown), shown


def test_in_a_pipe_a_line_has_no_escape_sequences() -> None:
    logged = subprocess.run([sys.executable, "-c", LOGGED], stderr=subprocess.PIPE, timeout=60, check=True).stderr
    assert logged.endswith(b" engine up\n") and b"\x1b" not in logged and b"\r" not in logged


def lines_on_a_terminal(monkeypatch: pytest.MonkeyPatch, *levels: str, **environment: str) -> list[str]:
    ours, theirs = pty.openpty()
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    for name, value in ({"TERM": "xterm", "NO_COLOR": ""} | environment).items():
        monkeypatch.setenv(name, value)
    with os.fdopen(ours, "rb", buffering=0) as terminal, os.fdopen(theirs, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        log.configure("api-0", logging.getLevelName(root.level))
        for level in levels:
            root.handlers[0].handle(logging.makeLogRecord({"msg": log.event("seen", id="a\x1b"), "levelname": level}))
        shown = b""
        while shown.count(b"\r\n") < len(levels):
            shown += terminal.read(4096)
    return shown.decode().split("\r\n")[:-1]


def test_a_terminal_gets_short_lines_and_a_colour_for_what_is_not_well(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, warning = lines_on_a_terminal(monkeypatch, "INFO", "WARNING")
    shape = r"\r\x1b\[2K\x1b\[2m\d\d:\d\d:\d\d api-0     \x1b\[0m "
    assert re.fullmatch(shape + r'seen id="a\\x1b"', plain), plain
    assert re.fullmatch(shape + r'\x1b\[33mWARNING\x1b\[0m seen id="a\\x1b"', warning), warning


def test_without_colour_a_terminal_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    [warning] = lines_on_a_terminal(monkeypatch, "WARNING", NO_COLOR="1")
    assert re.fullmatch(r'\r\x1b\[2K\d\d:\d\d:\d\d api-0      WARNING seen id="a\\x1b"', warning), warning


def as_json(event: str, **fields: object) -> dict:
    record = logging.makeLogRecord({"msg": event, "levelname": "WARNING", "created": 0.25} | fields)
    line = log.JsonFormatter("api-0").format(record)
    assert len(line.splitlines()) == 1 and line.isprintable()
    return json.loads(line)


def test_a_line_of_json_has_the_fields_as_they_are() -> None:
    fields = {
        "pid": 3,
        "cause": "signal 9",
        "s": 0.25,
        "none": None,
        "is_new": True,
        "places": [1, "x"],
        "path": Path("/x"),
    }
    assert as_json(log.event("worker lost", **fields)) == {
        "time": "1970-01-01T00:00:00.250+00:00",
        "level": "warning",
        "process": "api-0",
        "event": "worker lost",
        **fields,
        "path": "/x",
    }


def test_a_field_replaces_nothing_that_every_line_has() -> None:
    line = as_json(log.event("seen", level="x", process="y", time="z", traceback="t"))
    assert (line["level"], line["process"], line["level_"], line["process_"]) == ("warning", "api-0", "x", "y")
    assert line["time"].startswith("1970") and line["traceback_"] == "t"


@given(st.text(), st.floats())
def test_any_value_is_json_that_every_parser_reads(text: str, number: float) -> None:
    line = as_json(log.event("seen", id=text, number=number))
    assert line["id"] == text
    assert "NaN" not in json.dumps(line["number"]) or isinstance(line["number"], str)


def test_texts_of_other_libraries_and_tracebacks_are_json_too() -> None:
    assert as_json("of %s", args=(FORGED,))["event"] == f"of {FORGED}"
    try:
        raise ValueError(FORGED)
    except ValueError:
        line = as_json(log.event("a fault"), exc_info=sys.exc_info())
    assert line["event"] == "a fault"
    assert line["traceback"].startswith("Traceback") and FORGED in line["traceback"]


def test_a_request_s_events_name_its_label_if_it_has_one() -> None:
    assert log.event("x", **log.request_fields("r-1", "")) == "x id=r-1"
    assert log.event("x", **log.request_fields("r-1", "my own")) == 'x id=r-1 label="my own"'
