"""A pytest plugin that breaks one rule for the whole run: `pytest -p tests.sabotage.plugin --sabotage NAME`.

The run succeeds only if every test of it fails, and none of them by a fault of the bug itself. Processes that the tests
start have the same rule broken.
"""

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

from tests.sabotage.child import row, sabotaged
from tests.sabotage.patches import FAULTS_FILE, Patches
from tests.sabotage.table import TABLE


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sabotage", choices=[sabotage.name for sabotage in TABLE], help="the rule to break")


def pytest_configure(config: pytest.Config) -> None:
    name: str = config.getoption("--sabotage")  # type: ignore[assignment]
    descriptor, os.environ[FAULTS_FILE] = tempfile.mkstemp(prefix="sabotage-faults-")
    os.close(descriptor)
    patches = Patches()
    row(name).apply(patches)
    _break_children(patches, name)
    # The first counterexample will do, and it must not be tried again in a healthy run.
    hypothesis.settings.register_profile("sabotage", phases=[hypothesis.Phase.generate], database=None)
    hypothesis.settings.load_profile("sabotage")
    config.pluginmanager.register(_Verdict(Path(os.environ[FAULTS_FILE])), "sabotage-verdict")


def _break_children(patches: Patches, name: str) -> None:
    def start(original: Callable, self: object, args: object, *rest: object, **named: object) -> None:
        original(self, sabotaged(args, name) if isinstance(args, list) else args, *rest, **named)

    patches.around(subprocess.Popen, "__init__", start)


class _Verdict:
    """The run succeeds if every single test of it has failed. One that could not even begin has noticed nothing."""

    def __init__(self, faults_file: Path) -> None:
        self._faults_file = faults_file
        self._faults: list[str] = []
        self._unmoved: list[str] = []
        self._failed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed += report.when == "call" and report.failed
        if (report.when == "call" and not report.failed) or (report.when == "setup" and not report.passed):
            self._unmoved.append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._faults = sorted({*self._faults_file.read_text().splitlines()})
        self._faults_file.unlink()
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            session.exitstatus = 0 if self._failed and not self._unmoved and not self._faults else 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for nodeid in self._unmoved:
            terminalreporter.write_line(f"DID NOT NOTICE {nodeid}")
        for fault in self._faults:
            terminalreporter.write_line(f"THE BUG IS BROKEN: {fault}")
