"""The Helm chart: its values, and that it renders to the manifests. Rendering needs Helm, which Debian does not have."""

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from onward.version import __version__
from tests.deploy.manifests import DEPLOY, documents

CHART = DEPLOY / "helm" / "onward"
TEMPLATES = sorted((CHART / "templates").glob("*.yaml"))
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def value_of(path: str) -> Any:
    found = VALUES
    for name in path.split("."):
        found = found[name]
    return found


def test_every_value_that_a_template_uses_is_declared_and_used() -> None:
    used = {path for file in TEMPLATES for path in re.findall(r"\.Values\.([\w.]+)", file.read_text())}
    assert used and all(value_of(path) is not None for path in used)
    declared = {f"{name}.{key}" for name, value in VALUES.items() if isinstance(value, dict) for key in value}
    declared |= {name for name, value in VALUES.items() if not isinstance(value, dict)}
    assert used == declared


def test_the_chart_has_a_template_for_each_manifest_and_the_version_of_the_package() -> None:
    optional = {"autoscaling-hpa.yaml", "autoscaling-keda.yaml", "inference-pool.yaml"}
    manifests = {file.name for file in (DEPLOY / "kubernetes").glob("*.yaml")}
    assert {file.name for file in TEMPLATES} == manifests - optional
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


@pytest.mark.helm
@pytest.mark.parametrize("layout", ["mixed", "prefill-decode", "tensor-parallel"])
def test_the_chart_renders_to_the_manifests(layout: str) -> None:
    helm = shutil.which("helm")
    assert helm is not None, "this test needs Helm on PATH: https://helm.sh"
    rendered = subprocess.run(
        [helm, "template", "onward", str(CHART), "--set", f"layout={layout}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert rendered.returncode == 0, rendered.stderr
    names = ("router.yaml", f"{layout}.yaml", "network-policy.yaml")
    expected = [one for name in names for one in documents(DEPLOY / "kubernetes" / name)]
    found = [one for one in yaml.safe_load_all(rendered.stdout) if one is not None]

    def identity(document: dict[str, Any]) -> tuple[str, str]:
        return document["kind"], document["metadata"]["name"]

    assert sorted(found, key=identity) == sorted(expected, key=identity)
