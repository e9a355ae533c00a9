"""Test suites of other servers, run from a checkout that the user has. Nothing of them is fetched, changed or committed.

The suite's own start of a server is replaced by the address of a running one, and nothing else. What does not apply is
named here, with its reason, before a run; a test that is named and passes counts as passed.
"""

import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import urlsplit

from .clients import ClientChecks, Runtime
from .results import CheckResult, Outcome, Reason

TIMEOUT_S = 3600
TEST_TIMEOUT_S = 120
EXTERNAL_PLUGIN = "external_server"
PLUGINS = Path(__file__).parent / "plugins"


@dataclass(frozen=True, slots=True)
class ServerSuite:
    name: str
    packages: tuple[str, ...]
    """What the tests import, beside the checkout."""
    folder: str
    """Where pytest runs, from the root of the checkout."""
    tests: tuple[str, ...]
    served_names: tuple[str, ...]
    """Models that the tests ask for; the default model answers to them."""
    not_applicable: tuple[tuple[str, Reason], ...]
    """Patterns of test ids (`file.py::test[case]`), the first that matches counts."""
    needs_plugin: bool
    """The suite has no setting for a running server, so a pytest plugin replaces its launcher."""

    @property
    def environment(self) -> ClientChecks:
        return ClientChecks(self.name, Runtime.PYTHON, self.packages, "")

    def reason(self, test: str) -> Reason | None:
        return next((reason for pattern, reason in self.not_applicable if fnmatchcase(test, pattern)), None)


_OWN = Reason.PRIVATE_ROUTE
LLAMA_CPP = ServerSuite(
    name="llama.cpp",
    packages=(
        "pytest==8.3.5",
        "pytest-timeout==2.4.0",
        "openai==2.14.0",
        "aiohttp==3.9.5",
        "numpy==1.26.4",
        "requests==2.32.5",
        "wget==3.2",
        "prometheus-client==0.20.0",
    ),
    folder="tools/server/tests",
    tests=("unit",),
    served_names=(
        "tinyllama-2",
        "test",
        "gpt-3.5-turbo",
        "gpt-3.5-turbo-instruct",
        "davinci-002",
        "gpt-4.1",
        "text-embedding-3-small",
    ),
    not_applicable=(
        # Their paths have no /v1, or the bodies are those of its own routes.
        ("unit/test_chat_completion.py::*", _OWN),
        ("unit/test_completion.py::*", _OWN),
        ("unit/test_infill.py::*", _OWN),
        ("unit/test_template.py::*", _OWN),
        ("unit/test_tokenize.py::*", _OWN),
        ("unit/test_ignore_eos.py::*", _OWN),
        ("unit/test_metrics.py::*", _OWN),
        ("unit/test_slot_save.py::*", _OWN),
        ("unit/test_basic.py::*", _OWN),
        ("unit/test_compat_gcp.py::*", _OWN),
        ("unit/test_stream.py::*", _OWN),
        ("unit/test_security.py::*", Reason.LAUNCH_OPTIONS),
        ("unit/test_ctx_shift.py::*", Reason.LAUNCH_OPTIONS),
        ("unit/test_kv_keep_only_active.py::*", Reason.LAUNCH_OPTIONS),
        ("unit/test_speculative.py::*", Reason.LAUNCH_OPTIONS),
        ("unit/test_router.py::*", Reason.LAUNCH_OPTIONS),
        ("unit/test_proxy.py::*", Reason.LAUNCH_OPTIONS),
        ("unit/test_sleep.py::*", Reason.LAUNCH_OPTIONS),
        ("unit/test_mcp_servers.py::*", Reason.LAUNCH_OPTIONS),
        ("unit/test_tools_builtin.py::*", Reason.LAUNCH_OPTIONS),
        ("unit/test_lora.py::*", Reason.EXCLUDED),
        ("unit/test_vision_api.py::*", Reason.MEDIA),
        ("unit/test_rerank.py::*", Reason.LARGER_MODEL),
        ("unit/test_tool_call.py::*", Reason.LARGER_MODEL),
        ("unit/test_embedding.py::test_embedding_pooling*", Reason.LAUNCH_OPTIONS),
        ("unit/test_compat_anthropic.py::*vision*", Reason.MEDIA),
        ("unit/test_compat_anthropic.py::*image*", Reason.MEDIA),
    ),
    needs_plugin=False,
)
VLLM = ServerSuite(
    name="vllm",
    packages=("vllm==0.33.0", "pytest==8.4.2", "pytest-asyncio==1.2.0", "pytest-timeout==2.4.0", "openai==2.14.0"),
    folder=".",
    tests=("tests/entrypoints/openai", "tests/entrypoints/anthropic"),
    served_names=(
        "Qwen/Qwen2-1.5B-Instruct",
        "Qwen/Qwen3-0.6B",
        "HuggingFaceH4/zephyr-7b-beta",
        "Qwen/Qwen3-1.7B",
        "facebook/opt-125m",
    ),
    not_applicable=(
        ("*lora*", Reason.EXCLUDED),
        ("*prompt_embeds*", Reason.EXCLUDED),
        ("*harmony*", Reason.SUITE_INTERNALS),
        ("*_utils.py::*", Reason.SUITE_INTERNALS),
        ("*test_serving_*", Reason.SUITE_INTERNALS),
        ("*test_protocol*", Reason.SUITE_INTERNALS),
        ("*_conversion.py::*", Reason.SUITE_INTERNALS),
        ("*test_cli_args.py::*", Reason.SUITE_INTERNALS),
        ("*test_run_batch.py::*", Reason.LAUNCH_OPTIONS),
        ("*render*", Reason.PRIVATE_ROUTE),
        ("*test_lmeval.py::*", Reason.LARGER_MODEL),
        ("*mcp*", Reason.EXCLUDED),
    ),
    needs_plugin=True,
)
SUITES = {suite.name: suite for suite in (LLAMA_CPP, VLLM)}


def run_suite(suite: ServerSuite, checkout: Path, folder: Path, url: str, log: Path) -> list[CheckResult]:
    """One result for each test that pytest reports."""
    report = log.with_suffix(".xml")
    report.unlink(missing_ok=True)
    address = urlsplit(url)
    variables = [f"ONWARD_COMPAT_URL={url}", f"PORT={address.port}", "DEBUG_EXTERNAL=1", "OPENAI_API_KEY=none"]
    options = ["-p", "no:cacheprovider", "--timeout", str(TEST_TIMEOUT_S), "--junitxml", str(report)]
    if suite.needs_plugin:
        variables.append(f"PYTHONPATH={PLUGINS}")
        options += ["-p", EXTERNAL_PLUGIN]
    pytest = [str(folder / "bin" / "python"), "-m", "pytest", *options, *suite.tests]
    with log.open("wb") as output:
        subprocess.run(
            ["env", *variables, *pytest],
            cwd=checkout / suite.folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
        )
    if not report.exists():
        return [CheckResult("pytest", Outcome.FAILED, detail=f"it has written no report; see {log}")]
    return read_report(suite, report.read_text())


def read_report(suite: ServerSuite, text: str) -> list[CheckResult]:
    """The results of a JUnit report. Tests that the suite itself skips say so in their detail."""
    return [_result(suite, case) for case in ElementTree.fromstring(text).iter("testcase")]


def _result(suite: ServerSuite, case: ElementTree.Element) -> CheckResult:
    test = test_id(case.get("classname", ""), case.get("name", ""))
    problems = [child for child in case if child.tag in ("failure", "error", "skipped")]
    if not problems:
        return CheckResult(test, Outcome.PASSED)
    detail = (problems[0].get("message") or "")[:300]
    reason = suite.reason(test)
    if reason is None and problems[0].tag == "skipped":
        reason = Reason.SUITE_SKIPS
    if reason is not None:
        return CheckResult(test, Outcome.NOT_APPLICABLE, reason, detail)
    return CheckResult(test, Outcome.FAILED, detail=detail)


def test_id(class_name: str, name: str) -> str:
    """`unit.test_basic` and `test_a[b]` -> `unit/test_basic.py::test_a[b]`; with `.TestX` -> `…py::TestX::test_a[b]`."""
    parts: Sequence[str] = class_name.split(".")
    if not class_name:
        return name.replace(".", "/") + ".py"  # a file that could not be collected
    at = next((at for at, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
    return "::".join(["/".join(parts[: at + 1]) + ".py", *parts[at + 1 :], name])
