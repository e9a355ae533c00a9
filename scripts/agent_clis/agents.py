"""The agents: their packages and versions, how each is configured for a server, and the turns that solve the task.

The task: `main.py` has a wrong word in it, and the agent replaces it by the right one.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.agent_clis.installs import Source
from scripts.agent_clis.scripted_model import MODEL, Turns, call

TASK = "In main.py, replace the word wrong by the word right."
FILE_NAME = "main.py"
BEFORE, AFTER = 'answer = "wrong"\n', 'answer = "right"\n'
DONE = "The word is replaced."
KEY = "none"


@dataclass(frozen=True, slots=True)
class Setup:
    """What an agent needs to work on the task."""

    url: str
    home: Path
    """Its home folder, empty at first."""
    project: Path
    """The folder with `main.py`."""


@dataclass(frozen=True, slots=True)
class Agent:
    name: str
    source: Source
    package: str
    version: str
    path: str
    """The endpoint that it uses."""
    turns: Callable[[Path], Turns]
    """Returns the model's answers. The argument: `main.py`."""
    configure: Callable[[Setup], Mapping[str, str]]
    """Writes the configuration, and returns environment variables."""
    command: tuple[str, ...]
    """Runs the task, in the project's folder."""
    has_tools: bool = True


def _codex_turns(file: Path) -> Turns:
    patch = f"*** Begin Patch\n*** Update File: {FILE_NAME}\n@@\n-{BEFORE}+{AFTER}*** End Patch\n"
    apply = f"apply_patch <<'EOF'\n{patch}EOF\n"
    return [call("exec_command", cmd=f"cat {FILE_NAME}"), call("exec_command", cmd=apply), DONE]


def _configure_codex(setup: Setup) -> Mapping[str, str]:
    folder = setup.home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        f"""model = "{MODEL}"
model_provider = "onward"

[model_providers.onward]
name = "Onward"
base_url = "{setup.url}/v1"
wire_api = "responses"
"""
    )
    return {}


def _claude_turns(file: Path) -> Turns:
    edit = call("Edit", file_path=str(file), old_string=BEFORE.strip(), new_string=AFTER.strip())
    return [call("Read", file_path=str(file)), edit, DONE]


def _configure_claude(setup: Setup) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": setup.url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _opencode_turns(file: Path) -> Turns:
    edit = call("edit", filePath=str(file), oldString=BEFORE.strip(), newString=AFTER.strip())
    return [call("read", filePath=str(file)), edit, DONE]


def _configure_opencode(setup: Setup) -> Mapping[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Onward",
        "options": {"baseURL": f"{setup.url}/v1", "apiKey": KEY},
        "models": {MODEL: {"name": MODEL}},
    }
    config = {"model": f"onward/{MODEL}", "small_model": f"onward/{MODEL}", "provider": {"onward": provider}}
    (setup.project / "opencode.json").write_text(json.dumps(config))
    return {}


def _aider_turns(file: Path) -> Turns:
    return [f"{FILE_NAME}\n```python\n<<<<<<< SEARCH\n{BEFORE}=======\n{AFTER}>>>>>>> REPLACE\n```\n"]


def _configure_aider(setup: Setup) -> Mapping[str, str]:
    return {"OPENAI_API_BASE": f"{setup.url}/v1", "OPENAI_API_KEY": KEY}


_AIDER_FLAGS = (
    "--no-git",
    "--yes-always",
    "--no-show-model-warnings",
    "--no-check-update",
    "--analytics-disable",
)

AGENTS = (
    Agent(
        "codex",
        Source.NPM,
        "@openai/codex",
        "0.169.0",
        "/v1/responses",
        _codex_turns,
        _configure_codex,
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK),
    ),
    Agent(
        "claude",
        Source.NPM,
        "@anthropic-ai/claude-code",
        "2.1.197",
        "/v1/messages",
        _claude_turns,
        _configure_claude,
        ("claude", "-p", TASK, "--permission-mode", "acceptEdits"),
    ),
    Agent(
        "opencode",
        Source.NPM,
        "opencode-ai",
        "1.18.33",
        "/v1/chat/completions",
        _opencode_turns,
        _configure_opencode,
        ("opencode", "run", TASK),
    ),
    Agent(
        "aider",
        Source.PYPI,
        "aider-chat",
        "0.86.2",
        "/v1/chat/completions",
        _aider_turns,
        _configure_aider,
        ("aider", "--model", f"openai/{MODEL}", "--edit-format", "diff", *_AIDER_FLAGS, "--message", TASK, FILE_NAME),
        has_tools=False,
    ),
)
