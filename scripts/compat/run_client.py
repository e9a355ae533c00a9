"""Runs the check script of one client against one address, and reads what it reports."""

import subprocess
import tempfile
from pathlib import Path

import msgspec

from .clients import BASE_CHECKS, ClientChecks
from .installs import command
from .results import CheckResult, Outcome
from .tokenizer_file import write_tokenizer

CHECKS = Path(__file__).parent / "checks"
TIMEOUT_S = 1800


def run_client(client: ClientChecks, folder: Path, url: str, model: str, log: Path) -> list[CheckResult]:
    """A script that ends early fails the checks that it has not reported."""
    with tempfile.TemporaryDirectory(prefix="compat-") as name, log.open("wb") as output:
        reported = Path(name) / "results.jsonl"
        reported.touch()
        write_tokenizer(model, Path(name))
        arguments = ["--url", url, "--model", model, "--results", str(reported), "--folder", name]
        run = [*command(client, folder, CHECKS / client.script), *arguments]
        try:
            status = subprocess.run(
                run, stdout=output, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, cwd=name
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
        results = [msgspec.json.decode(line, type=CheckResult) for line in reported.read_bytes().splitlines()]
    if status != 0:
        results.append(CheckResult("script", Outcome.FAILED, detail=f"it ended with status {status}; see {log}"))
    missing = BASE_CHECKS - {one.name for one in results}
    return results + [CheckResult(name, Outcome.FAILED, detail="not reported") for name in sorted(missing)]
