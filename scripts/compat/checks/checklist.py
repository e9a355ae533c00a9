"""Runs the checks of one client and reports each as a line of JSON. It runs in the client's environment, without Onward."""

import argparse
import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

CAPITAL = "What is the capital of France? Answer in one sentence."
"""The default model answers it with Paris, at temperature 0."""
ABSENT_MODEL = "no-such-model"


class Checklist:
    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--url", required=True)
        parser.add_argument("--model", required=True)
        parser.add_argument("--results", required=True)
        parser.add_argument("--folder", required=True, help="for files of the checks")
        args = parser.parse_args()
        self.url: str = args.url
        self.base_url = args.url + "/v1"
        self.model: str = args.model
        self.folder: str = args.folder
        self._results = Path(args.results)
        self._runner = asyncio.Runner()

    def check(self, name: str) -> Callable[[Callable[[], Any]], None]:
        """Runs the decorated function at once. It fails if it raises."""

        def run(function: Callable[[], Any]) -> None:
            try:
                result = function()
                if inspect.iscoroutine(result):
                    self._runner.run(result)
            except Exception as fault:
                traceback.print_exc(file=sys.stderr)
                self._report(name, "failed", detail=f"{type(fault).__name__}: {fault}"[:500])
            else:
                self._report(name, "passed")

        return run

    def not_applicable(self, name: str, reason: str) -> None:
        """`reason` is a value of `Reason`."""
        self._report(name, "not_applicable", reason=reason)

    def client_lacks(self, *names: str) -> None:
        for name in names:
            self.not_applicable(name, "the client has no such function")

    def _report(self, name: str, outcome: str, **more: str) -> None:
        with self._results.open("a", encoding="utf-8") as results:
            results.write(json.dumps({"name": name, "outcome": outcome, **more}) + "\n")


def expect_error(kind: type[BaseException], function: Callable[[], Any], *words: str) -> Any:
    """The error of this type that the function raises; its text has all the words."""
    try:
        function()
    except kind as fault:
        for word in words:
            assert word in str(fault), f"{word!r} is not in {fault}"
        return fault
    raise AssertionError(f"no {kind.__name__}")
