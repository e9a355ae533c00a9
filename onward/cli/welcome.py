"""What `onward serve` prints when it is ready: where it is, and what to type next. `onward up` waits for it."""

from rich.console import Console
from rich.text import Text

from onward.config import DEFAULT_MODEL, ServeConfig
from onward.supervisor.pd import PdPlan

GREETING = "  Onward "
"""How the first line begins, on standard output and only once the instance is ready."""


def welcome(console: Console, config: ServeConfig, model_name: str, url: str, pd: PdPlan) -> None:
    for line in _lines(config, model_name, url, pd):
        console.print(line, soft_wrap=True, markup=False)


def _lines(config: ServeConfig, model_name: str, url: str, pd: PdPlan) -> list[str | Text]:
    if config.role == "prefill":
        return _prefill_lines(config, model_name, url, pd)
    lines: list[str | Text] = [
        Text.assemble("\n", GREETING, "serves ", (model_name, "bold"), " at ", (url, "bold cyan"), "\n")
    ]
    if pd.peers:
        lines.append(f"  Prompts are computed by {', '.join(pd.peers)}\n")
    if pd.handoff_address is not None:
        lines.append(f"  It also prefills for decode instances at {pd.handoff_address}\n")
    return [*lines, curl(model_name, url)]


def _prefill_lines(config: ServeConfig, model_name: str, url: str, pd: PdPlan) -> list[str | Text]:
    assert pd.handoff_address is not None, "a prefill instance listens for decode instances"
    head = Text.assemble(
        *("\n", GREETING, "prefills ", (model_name, "bold"), " for decode instances at "),
        *((pd.handoff_address, "bold cyan"), "\n"),
    )
    flags = [f"--role decode --prefill-peers {pd.handoff_address}"]
    if config.model != DEFAULT_MODEL:
        flags.append(f"--model {config.model}")
    if config.cluster_key_file is not None:
        flags.append(f"--cluster-key-file {config.cluster_key_file}")
    return [
        head,
        f"  Start one with: onward serve {' '.join(flags)} --port 8001\n",
        f"  Its health and metrics are at {url}\n",
    ]


def curl(model_name: str, url: str) -> str:
    # A small model left to chance talks without end, so the first request that people try is kept short and calm.
    message = '{"role": "user", "content": "What is the capital of France?"}'
    body = f'{{"model": "{model_name}", "messages": [{message}], "temperature": 0.2, "max_tokens": 100}}'
    return f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n       -d '{body}'\n"
