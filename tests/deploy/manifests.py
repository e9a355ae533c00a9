"""What `deploy/` has: documents, containers and the `onward` commands in them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
COMPOSE = DEPLOY / "compose" / "compose.yaml"
DOCKERFILE = DEPLOY / "container" / "Dockerfile"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
POD_VARIABLES = {"POD_NAME": "onward-mixed-0", "POD_IP": "10.1.2.3"}


class OnwardCommand(NamedTuple):
    where: str
    words: tuple[str, ...]
    """Without `onward` itself."""


def documents(file: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(file.read_text()) if one is not None]


def stateful_sets() -> list[tuple[str, dict[str, Any]]]:
    """Name and the pod's spec of each StatefulSet."""
    return [
        (one["metadata"]["name"], one["spec"]["template"]["spec"])
        for file in KUBERNETES
        for one in documents(file)
        if one["kind"] == "StatefulSet"
    ]


def onward_commands() -> list[OnwardCommand]:
    """Every `onward …` that a deploy file runs, with the variables that it is given replaced."""
    return [*_in_pods(), *_in_compose(), *_in_dockerfile(), *_in_units()]


def _in_pods() -> Iterator[OnwardCommand]:
    for name, pod in stateful_sets():
        for container in pod["containers"]:
            words = [re.sub(r"\$\((\w+)\)", lambda found: POD_VARIABLES[found[1]], word) for word in container["args"]]
            yield OnwardCommand(name, tuple(words))
            if (hook := container["lifecycle"]["preStop"].get("exec")) is not None:
                assert hook["command"][0] == "onward"
                yield OnwardCommand(f"{name} preStop", tuple(hook["command"][1:]))


def _in_compose() -> Iterator[OnwardCommand]:
    for name, service in yaml.safe_load(COMPOSE.read_text())["services"].items():
        if service["image"].startswith("onward:"):
            yield OnwardCommand(f"compose {name}", tuple(service["command"]))


def _in_dockerfile() -> Iterator[OnwardCommand]:
    for line in re.findall(r"^CMD (\[.*\])$", DOCKERFILE.read_text(), re.MULTILINE):
        yield OnwardCommand("Dockerfile", tuple(yaml.safe_load(line)))


def _in_units() -> Iterator[OnwardCommand]:
    for unit in UNITS:
        [line] = re.findall(r"^ExecStart=/opt/onward/bin/onward (.*)$", unit.read_text(), re.MULTILINE)
        yield OnwardCommand(unit.name, tuple(word for word in shlex.split(line) if not word.startswith("$")))
