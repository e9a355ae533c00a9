"""The page of all metrics, from the calls in `onward/` that register them."""

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onward
from onward.obs.metric_names import DEPRECATED_NAMES, VLLM_NAMES
from onward.version import __version__

from .markdown import NOTE, code, sentence, table

PACKAGE = Path(onward.__file__).parent
_KINDS = {
    "counter": "counter",
    "derived_counter": "counter",
    "gauge": "gauge",
    "histogram": "histogram",
    "labelled_histogram": "histogram",
}
_SHARED = ("web", "obs")
"""Packages that instances and routers both use."""


@dataclass(frozen=True, slots=True)
class RegisteredMetric:
    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    package: str


def render() -> str:
    metrics = sorted(registered_metrics(), key=lambda metric: metric.name)
    routers = [metric for metric in metrics if metric.package == "router"]
    shared = [metric for metric in metrics if metric.package in _SHARED]
    instances = [metric for metric in metrics if metric not in routers and metric not in shared]
    columns = ("name", "type", "labels", "meaning")
    return "\n".join(
        [
            "# List of metrics\n",
            NOTE.format(version=__version__) + " [Metrics](../metrics.md) explains labels, causes and states.\n",
            "`GET /metrics` shows them in the text format of Prometheus. A histogram `NAME` has the series `NAME_bucket`,"
            " `NAME_sum` and `NAME_count`.\n",
            "## Instances\n",
            table(columns, map(_row, instances)),
            "## Routers\n",
            table(columns, map(_row, routers)),
            "## Instances and routers\n",
            table(columns, map(_row, shared)),
            "## Names that vLLM uses\n",
            "`--metrics-names vllm` of `onward serve` shows these too.\n",
            table(("vLLM's name", "Onward's name"), ((code(name), code(ours)) for name, (ours, _) in VLLM_NAMES)),
            "## Earlier names\n",
            "They are shown for one release after a metric was renamed.\n",
            table(("earlier name", "name"), ((code(name), code(ours)) for name, ours in DEPRECATED_NAMES.items())),
        ]
    )


def _row(metric: RegisteredMetric) -> tuple[str, str, str, str]:
    labels = ", ".join(code(label) for label in metric.labels)
    return code(metric.name), metric.kind, labels, sentence(metric.help.rstrip("."))


def registered_metrics() -> set[RegisteredMetric]:
    return {metric for path in sorted(PACKAGE.rglob("*.py")) for metric in _registered_in(path)}


def _registered_in(path: Path) -> Iterator[RegisteredMetric]:
    package = path.relative_to(PACKAGE).parts[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        match node.args:
            case [ast.Constant(str(name)), ast.Constant(str(text)), *rest] if function in _KINDS:
                labels = () if function == "histogram" or not rest else _evaluate(rest[0], path)
                yield RegisteredMetric(name, _KINDS[function], text, labels, package)


def _evaluate(labels: ast.expr, path: Path) -> tuple[str, ...]:
    """Returns the labels. Most are a list of strings; the others name a constant of their module."""
    if isinstance(labels, ast.List):
        return tuple(ast.literal_eval(labels))
    module = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
    return tuple(eval(ast.unparse(labels), vars(module)))
