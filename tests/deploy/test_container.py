"""What can be said of the container files without building them."""

import re
import tomllib

from tests.deploy.manifests import DOCKERFILE, ROOT

TEXT = DOCKERFILE.read_text()


def test_both_images_come_from_stages_and_run_without_root() -> None:
    stages = re.findall(r"^FROM (\S+) AS ([\w-]+)$", TEXT, re.MULTILINE)
    assert [name for _, name in stages][-2:] == ["cuda", "cpu"]
    for image in ("cpu", "cuda"):
        text = TEXT[TEXT.index(f" AS {image}\n") :].partition("\nFROM ")[0]
        users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
        assert not users or users[-1] == "10001:10001"
    base = TEXT[TEXT.index(" AS base\n") :].partition("\nFROM ")[0]
    assert re.findall(r"^USER (\S+)$", base, re.MULTILINE) == ["10001:10001"]
    assert "/health" in base and "HEALTHCHECK" in base


def test_both_images_can_send_traces() -> None:
    extras = dict(
        re.findall(r"^FROM \S+ AS environment-(\w+)$.*?^RUN [^\n]*\[([\w,]+)\]\"$", TEXT, re.MULTILINE | re.DOTALL)
    )
    assert {name: set(extra.split(",")) for name, extra in extras.items()} == {
        "cpu": {"otel"},
        "cuda": {"cuda", "otel"},
    }
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"cuda", "otel"} <= known.keys()


def test_the_build_gets_what_the_wheel_needs_and_nothing_else() -> None:
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    copied = [word for line in re.findall(r"^COPY (?!--)(.*) \S+$", TEXT, re.MULTILINE) for word in line.split()]
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / name).exists() for name in copied)
