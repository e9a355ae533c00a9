"""`make agents`: coding agents solve a task with Onward as their server, directly and through a router.

    make agents                              all agents
    make agents ARGS='--only codex,aider'    some of them

Installs each agent from npm or PyPI into build/agents, and needs Node.js for three of them. Prints the outcome of each
run, and fails if a task was not solved. Output of the agents is in build/agents/logs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from scripts.agent_clis.agents import AFTER, AGENTS, BEFORE, FILE_NAME, Agent, Setup
from scripts.agent_clis.installs import install
from scripts.agent_clis.scripted_model import instance
from tests.api.instance import Instance
from tests.e2e.cluster import RouterServer

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "agents"
TIMEOUT_S = 300
"""For one run. Agents wait long before they give up."""
_KEPT_VARIABLES = ("PATH", "LANG", "TERM", "SSL_CERT_FILE")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", help="agents, separated by commas")
    return parser.parse_args()


def main() -> int:
    only = parse().only
    wanted = None if only is None else set(only.split(","))
    agents = [agent for agent in AGENTS if wanted is None or agent.name in wanted]
    if wanted is not None and wanted != {agent.name for agent in agents}:
        print(f"--only: the agents are {', '.join(agent.name for agent in AGENTS)}", file=sys.stderr)
        return 2
    logs = FOLDER / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    num_failed = 0
    for agent in agents:
        commands = install(agent.source, agent.package, agent.version, FOLDER / agent.name)
        for num_instances, target in ((1, "directly"), (2, "through a router")):
            log = logs / f"{agent.name}-{num_instances}.txt"
            problem = run_task(agent, commands, num_instances, log)
            num_failed += problem is not None
            outcome = "solved" if problem is None else f"FAILED: {problem}; see {log}"
            print(f"{agent.name} {agent.version} {target} ({agent.path}): {outcome}", flush=True)
    return 1 if num_failed else 0


def run_task(agent: Agent, commands: Path, num_instances: int, log: Path) -> str | None:
    """Runs an agent, and returns what went wrong, or None if it has solved the task."""
    with tempfile.TemporaryDirectory(prefix="onward-agent-") as name:
        folder = Path(name).resolve()
        home, project = folder / "home", folder / "project"
        home.mkdir()
        project.mkdir()
        file = project / FILE_NAME
        file.write_text(BEFORE)
        with serving(agent, file, num_instances) as (url, servers):
            variables = agent.configure(Setup(url, home, project))
            kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
            kept["PATH"] = f"{commands}{os.pathsep}{kept['PATH']}"
            problem = _run(agent, project, {**kept, "HOME": str(home), **variables}, log)
            num_requests = sum(len(server.engine.submits) for server in servers)
        if problem is not None:
            return problem
        if file.read_text() != AFTER:
            return f"{FILE_NAME} is {file.read_text()!r} after {num_requests} requests"
        return None


@contextmanager
def serving(agent: Agent, file: Path, num_instances: int) -> Iterator[tuple[str, list[Instance]]]:
    """Yields the address for the agent, and the instances. Several instances are behind a router."""
    with ExitStack() as stack:
        servers: list[Instance] = []
        for index in range(num_instances):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="onward-agent-model-")))
            model = instance(folder, agent.turns(file), has_tools=agent.has_tools, name=f"instance-{index}")
            servers.append(stack.enter_context(model))
        url = servers[0].url
        if num_instances > 1:
            urls = ",".join(server.url for server in servers)
            url = stack.enter_context(RouterServer("--instances", urls)).url
        yield url, servers


def _run(agent: Agent, project: Path, environment: dict[str, str], log: Path) -> str | None:
    with log.open("wb") as output:
        try:
            ended = subprocess.run(
                agent.command,
                cwd=project,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return f"it did not end within {TIMEOUT_S} s"
    return None if ended.returncode == 0 else f"it ended with status {ended.returncode}"


if __name__ == "__main__":
    sys.exit(main())
