"""What a run of `make compat` found, as `docs/compatibility.json` keeps it. Reasons and outcomes are closed lists."""

from enum import Enum
from pathlib import Path

import msgspec

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "compatibility.json"


class Outcome(Enum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not_applicable"


class Reason(Enum):
    """Why a check does not apply. The list was fixed before the first run; a new reason needs a decision."""

    CLIENT_LACKS_IT = "the client has no such function"
    LARGER_MODEL = "needs a larger or another model"
    SUITE_INTERNALS = "tests the suite's own code, and sends nothing to a server"
    LAUNCH_OPTIONS = "needs start options of the other server, or starts it in another way"
    PRIVATE_ROUTE = "a private route, field, limit or text of the other engine"
    MEDIA = "images, audio or video"
    EXCLUDED = "a feature that a documented decision leaves out"
    NETWORK = "needs files from a network"
    HARDWARE = "needs other hardware"
    SUITE_SKIPS = "the suite itself skips it here"


class Target(Enum):
    DIRECT = "direct"
    ROUTER = "router"


class CheckResult(msgspec.Struct, frozen=True):
    name: str
    outcome: Outcome
    reason: Reason | None = None
    detail: str = ""


class TargetCounts(msgspec.Struct, frozen=True):
    passed: int
    not_applicable: dict[Reason, int]
    failed: list[str]
    """The names of the checks."""

    def summary(self) -> str:
        return f"{self.passed} passed, {len(self.failed)} failed, {sum(self.not_applicable.values())} not applicable"


class SuiteResult(msgspec.Struct, frozen=True):
    name: str
    version: str
    targets: dict[Target, TargetCounts]


class Results(msgspec.Struct, frozen=True):
    onward: str
    model: str
    suites: list[SuiteResult]

    def updated(self, suite: SuiteResult) -> "Results":
        """These results with one suite replaced or added, in the order of names."""
        suites = {one.name: one for one in self.suites} | {suite.name: suite}
        return msgspec.structs.replace(self, suites=[suites[name] for name in sorted(suites, key=str.lower)])


def count(checks: list[CheckResult]) -> TargetCounts:
    reasons: dict[Reason, int] = {}
    for one in checks:
        if one.outcome is Outcome.NOT_APPLICABLE:
            assert one.reason is not None, one.name
            reasons[one.reason] = reasons.get(one.reason, 0) + 1
    failed = sorted(one.name for one in checks if one.outcome is Outcome.FAILED)
    return TargetCounts(
        sum(one.outcome is Outcome.PASSED for one in checks), dict(sorted(reasons.items(), key=_by_name)), failed
    )


def _by_name(item: tuple[Reason, int]) -> str:
    return item[0].name


def read_results(path: Path = RESULTS) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)


def write_results(results: Results, path: Path = RESULTS) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
