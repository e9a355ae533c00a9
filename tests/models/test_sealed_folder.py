import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from onward.models.loader import sealed_folder

LARGE = 3 << 20


def write(folder: Path) -> None:
    (folder / "small").write_bytes(b"hello")
    (folder / "large").write_bytes(bytes(range(256)) * (LARGE // 256))


def cut(folder: Path) -> None:
    with (folder / "large").open("r+b") as file:
        file.truncate(LARGE - 1)


def zero_pages(folder: Path) -> None:
    """What a crash may leave of a file whose pages had not reached the disk."""
    with (folder / "large").open("r+b") as file:
        file.seek(LARGE // 2)
        file.write(bytes(LARGE // 2))


def change_small(folder: Path) -> None:
    (folder / "small").write_bytes(b"hallo")


def remove_file(folder: Path) -> None:
    (folder / "small").unlink()


def break_seal(folder: Path) -> None:
    (folder / sealed_folder.SEAL).write_bytes(b"{")


def remove_seal(folder: Path) -> None:
    (folder / sealed_folder.SEAL).unlink()


@pytest.mark.parametrize("damage", [cut, zero_pages, change_small, remove_file, break_seal, remove_seal])
def test_a_damaged_folder_is_noticed_and_built_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = tmp_path / "cache" / "it"
    sealed_folder.build_folder(folder, write)
    assert sealed_folder.is_intact(folder)
    damage(folder)
    assert not sealed_folder.is_intact(folder)
    sealed_folder.build_folder(folder, write)
    assert sealed_folder.is_intact(folder)
    assert left_over(tmp_path / "cache") == []


def test_an_intact_folder_is_not_built_again(tmp_path: Path) -> None:
    sealed_folder.build_folder(tmp_path / "it", write)

    def must_not_run(folder: Path) -> None:
        raise AssertionError("built twice")

    sealed_folder.build_folder(tmp_path / "it", must_not_run)


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        sealed_folder.build_folder(tmp_path / "it", fail)
    assert not (tmp_path / "it").exists()
    assert left_over(tmp_path) == []


def test_what_a_build_that_was_killed_has_left_is_removed_by_a_later_one(tmp_path: Path) -> None:
    folder = tmp_path / "model [1]"
    old, young, other = (tmp_path / f".{name}" for name in (f"{folder.name}.0a", f"{folder.name}.0b", "model 1.0c"))
    for left in (old, young, other):
        left.mkdir()
        (left / "weights").write_bytes(b"half")
    for path in (old / "weights", old, other / "weights", other):
        os.utime(path, (0, 0))
    sealed_folder.build_folder(folder, write)
    assert sealed_folder.is_intact(folder)
    assert not old.exists()
    assert young.exists(), "somebody may be writing it"
    assert other.exists(), "of another folder"


def test_a_folder_that_another_process_put_there_meanwhile_is_kept(tmp_path: Path) -> None:
    """The lock is held around `write`, so this stands for one that was passed over."""
    folder = tmp_path / "it"

    def write_while_another_finishes(mine: Path) -> None:
        theirs = tmp_path / "other"
        sealed_folder.build_folder(theirs, write)
        theirs.rename(folder)
        write(mine)
        (mine / "mine").touch()

    sealed_folder.build_folder(folder, write_while_another_finishes)
    assert sealed_folder.is_intact(folder)
    assert not (folder / "mine").exists()


def build_and_count(folder: Path, log: Path) -> None:
    def counted(target: Path) -> None:
        with log.open("a") as file:
            file.write("built\n")
        write(target)

    sealed_folder.build_folder(folder, counted)
    assert sealed_folder.is_intact(folder)


def test_of_processes_that_race_one_builds_and_all_find_the_folder(tmp_path: Path) -> None:
    folder, log = tmp_path / "cache" / "it", tmp_path / "log"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=build_and_count, args=(folder, log)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert log.read_text() == "built\n"
    assert left_over(tmp_path / "cache") == []


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".") and path.suffix != ".lock"]
