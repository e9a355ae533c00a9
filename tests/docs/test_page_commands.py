"""How the commands of a page become a script: what is run, what is not, and that a failure is noticed."""

import subprocess
from pathlib import Path

import pytest

from tests.docs.page_commands import PRELUDE, blocks_of, commands_of, script_of


def script_of_text(text: str, folder: Path) -> str:
    page = folder / "page.md"
    page.write_text(text)
    return script_of(page, lambda port: f"5{port}").removeprefix(PRELUDE).strip()


@pytest.mark.parametrize(("command", "status"), [("true", 0), ("false", 1), ("no-such-command", 127)])
def test_a_command_that_fails_ends_the_script(command: str, status: int, tmp_path: Path) -> None:
    script_of_text(f"```sh\n{command}\necho done\n```\n", tmp_path)
    script = script_of(tmp_path / "page.md", lambda port: port)
    ran = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == status
    assert ("done" in ran.stdout) == (status == 0)


def test_a_marked_block_is_not_run_and_other_languages_are_no_commands(tmp_path: Path) -> None:
    marked = '```sh title="Needs a GPU"\nnvidia-smi\n```\n```json\n{}\n```\n```sh title="Try it"\ntrue\n```\n'
    assert script_of_text(marked, tmp_path) == "true"
    assert [block.is_marked for block in blocks_of(tmp_path / "page.md")] == [True, False]


def test_ports_are_replaced_and_servers_run_in_the_background(tmp_path: Path) -> None:
    text = "```sh\n.venv/bin/onward serve   # keeps running\nonward status http://127.0.0.1:8000\n```\n"
    started, asked = script_of_text(text, tmp_path).splitlines()
    assert started == "start_server 8000 '.venv/bin/onward serve --port 58000 --standby-worker off'"
    assert asked == "onward status http://127.0.0.1:58000"


def test_a_server_that_takes_the_port_of_another_one_replaces_it_unless_it_adopts_it(tmp_path: Path) -> None:
    text = "```sh\nonward serve\nonward serve --adopt\nonward up --port 8000\n```\n"
    script = script_of_text(text, tmp_path).splitlines()
    assert [line.split()[:2] for line in script] == [
        ["start_server", "8000"],
        ["start_server", "8000-adopted"],
        ["stop_server", "8000"],
        ["start_server", "8000"],
    ]


def test_a_page_for_readers_with_a_server_gets_one(tmp_path: Path) -> None:
    script = script_of_text("```python\nurl = 'http://127.0.0.1:8000'\n```\n", tmp_path)
    assert script.startswith(
        "start_server 8000 'onward serve --port 58000 --standby-worker off'\npython - <<'END_OF_BLOCK'\nurl = "
    )
    assert "start_server" not in script_of_text("```python\nimport onward\n```\n", tmp_path)


def test_output_below_a_prompt_is_not_run_and_commands_may_have_several_lines() -> None:
    assert list(commands_of("$ echo 1 \\\n    2\n1 2\n$ echo 3\n3")) == ["echo 1 \\\n    2", "echo 3"]
    assert list(commands_of("curl -d '{\n}'\ntrue  # it's fine")) == ["curl -d '{\n}'", "true  # it's fine"]
