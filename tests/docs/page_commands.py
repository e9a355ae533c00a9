"""The commands of a page, as a shell script that a test can run.

The blocks of a page run in order, in one shell and one folder, as a reader types them. A block whose title begins with
`Needs` is for hardware or software that a test does not have; the site shows that title above the block. Commands that
keep running (`onward serve`, `router` and `up`, `make serve`) run in the background, and the script goes on when they have
printed that they are ready. They get other ports, and no standby worker, which takes most of a second of a core to start.
"""

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

LANGUAGES = ("sh", "python")
MARK = "Needs "
_FENCE = re.compile(r'^```(\w+)(?: title="([^"\n]*)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_PROMPT = "$ "
_PORT = re.compile(r"(?<=[:\s])(?:8\d{3}|7001)\b")
_SERVER = re.compile(r"^(?:\.venv/bin/)?(?:onward (?P<command>serve|router|up)\b|make serve\b)")
_DEFAULT_PORTS = {"serve": "8000", "router": "8080", "up": "8000"}
_USES_SERVER = re.compile(r"127\.0\.0\.1:8000|localhost:8000|onward bench (?!offline)")
_BENCH = re.compile(r"^(?:\.venv/bin/)?onward bench (?!.*--url)")
_TESTS = "make test"
"""What runs the test that runs the page."""

PRELUDE = """\
set -eu
declare -A servers=()
start_server() {  # PORT COMMAND
    local out
    out=$(mktemp)
    eval "exec $2" > "$out" &
    servers[$1]=$!
    until grep -q '^  Onward ' "$out"; do kill -0 "${servers[$1]}"; sleep 0.05; done
}
stop_server() {  # PORT
    kill -TERM "${servers[$1]}" 2> /dev/null || true
    wait "${servers[$1]}" || true
    unset "servers[$1]"
}
stop_all() { for port in "${!servers[@]}"; do stop_server "$port"; done; }
trap stop_all EXIT
"""
DEFAULT_SERVER = "onward serve --port 8000"
_NO_STANDBY = "--standby-worker off"
_ANY_PORT = "0"


@dataclass(frozen=True, slots=True)
class Block:
    language: str
    title: str
    text: str

    @property
    def is_marked(self) -> bool:
        return self.title.startswith(MARK)


def blocks_of(page: Path) -> list[Block]:
    found = [Block(language, title, text) for language, title, text in _FENCE.findall(page.read_text())]
    return [block for block in found if block.language in LANGUAGES]


def script_of(page: Path, map_port: Callable[[str], str]) -> str:
    """Returns the script of all blocks that are not marked. `map_port` returns the port to use in the place of one that
    the page names."""
    parts = [PRELUDE]
    blocks = [block for block in blocks_of(page) if not block.is_marked]
    lines = [line for block in blocks if block.language == "sh" for line in commands_of(block.text)]
    if not any(map(_server_in, lines)) and any(_USES_SERVER.search(block.text) for block in blocks):
        # The page is for readers who have a server already.
        parts.append(f"start_server 8000 {shlex.quote(_mapped(f'{DEFAULT_SERVER} {_NO_STANDBY}', map_port))}")
    ports: set[str] = set()
    for block in blocks:
        if block.language == "python":
            parts.append(f"python - <<'END_OF_BLOCK'\n{_mapped(block.text, map_port)}END_OF_BLOCK\n")
            continue
        for line in commands_of(block.text):
            if (server := _server_in(line)) is None:
                parts.append(_mapped(_command_in(line), map_port))
                continue
            [port] = re.findall(r"--port (\d+)", server)
            key = f"any-{len(parts)}" if port == _ANY_PORT else f"{port}-adopted" if "--adopt" in server else port
            if key in ports:
                # The reader has stopped the earlier server with Ctrl-C.
                parts.append(f"stop_server {key}")
            ports.add(key)
            parts.append(f"start_server {key} {shlex.quote(_mapped(server, map_port))}")
    return "\n".join(parts) + "\n"


def commands_of(text: str) -> Iterator[str]:
    """Commands, each with its continuation lines. Where a block has prompts, the other lines are output."""
    lines = text.splitlines()
    has_prompts = any(line.startswith(_PROMPT) for line in lines)
    command = ""
    for line in lines:
        if has_prompts and not command and not line.startswith(_PROMPT):
            continue
        command += line.removeprefix(_PROMPT) if has_prompts and not command else line
        if line.endswith("\\") or _has_open_quote(command):
            command += "\n"
            continue
        yield command
        command = ""


def _has_open_quote(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False


def _command_in(line: str) -> str:
    if line.startswith(_TESTS):
        return ""
    return line.replace("bench", "bench --url http://127.0.0.1:8000", 1) if _BENCH.match(line) else line


def _server_in(line: str) -> str | None:
    """Returns the command of a server, with its port, or None if the line is another command."""
    server = _SERVER.match(line)
    if server is None:
        return None
    command = re.sub(r"\s+(?:#.*|&)$", "", line)
    if server["command"] is None:
        # What `make test` has installed already is not installed again.
        return f'make -o .venv/.installed serve ARGS="--port 8000 {_NO_STANDBY}"'
    if "--port" not in command:
        command += f" --port {_DEFAULT_PORTS[server['command']]}"
    return command if server["command"] == "router" else f"{command} {_NO_STANDBY}"


def _mapped(text: str, map_port: Callable[[str], str]) -> str:
    return _PORT.sub(lambda match: map_port(match[0]), text)
