"""The message that `onward serve` and `onward router` print when they are ready: their URL, and what to type next.
`onward up` waits for it."""

import os
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from onward.config import DEFAULT_MODEL, RouterConfig, ServeConfig
from onward.proto.model import PreparedModel
from onward.supervisor.pd_config import PdConfig
from onward.supervisor.registration_config import RegistrationConfig

READY_LINE_PREFIX = "  Onward "
"""Beginning of the first line. It is printed on standard output, and only once the instance is ready."""


def print_ready(
    console: Console,
    config: ServeConfig,
    model: PreparedModel,
    url: str,
    pd: PdConfig,
    routers: RegistrationConfig,
    summary: Sequence[tuple[str, str]] = (),
    *,
    needs_key: bool = False,
) -> None:
    """Prints the message of an instance. `summary` has titles and their texts."""
    greeting, *others = _lines(config, model, url, pd, routers, needs_key)
    summary_lines = [f"  {title:<10} {text}" for title, text in summary]
    for line in (greeting, *summary_lines, *([""] if summary_lines else []), *others):
        console.print(line, soft_wrap=True, markup=False)


def _lines(
    config: ServeConfig, model: PreparedModel, url: str, pd: PdConfig, routers: RegistrationConfig, needs_key: bool
) -> list[str | Text]:
    if config.role == "prefill":
        return [*_prefill_lines(config, model.name, url, pd), *_router_lines(routers)]
    lines: list[str | Text] = [
        Text.assemble("\n", READY_LINE_PREFIX, "serves ", (model.name, "bold"), " at ", (url, "bold cyan"), "\n"),
        f"  {model.resume_guarantee[0].upper()}{model.resume_guarantee[1:]}\n",
    ]
    if pd.prefill_peers:
        lines.append(f"  Prompts are computed by {', '.join(pd.prefill_peers)}\n")
    if pd.handoff_address is not None:
        lines.append(f"  It also prefills for decode instances at {pd.handoff_address}\n")
    return [*lines, *_router_lines(routers), curl_example(model, url, needs_key=needs_key)]


def _router_lines(routers: RegistrationConfig) -> list[str | Text]:
    if not routers.router_urls:
        return []
    return [f"  It registers as {routers.own_url} with {', '.join(routers.router_urls)}\n"]


def _prefill_lines(config: ServeConfig, model_name: str, url: str, pd: PdConfig) -> list[str | Text]:
    assert pd.handoff_address is not None, "a prefill instance listens for decode instances"
    head = Text.assemble(
        *("\n", READY_LINE_PREFIX, "prefills ", (model_name, "bold"), " for decode instances at "),
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


def print_router_ready(console: Console, config: RouterConfig, url: str) -> None:
    """Prints the message of a router. `onward up` reads its first line too. There is no example request, because a
    router has no model of its own."""
    policies = [config.policy]
    policies += [f"{role} by {own}" for role, own in _own_policies(config) if own is not None]
    key = f" --cluster-key-file {config.cluster_key_file}" if config.cluster_key_file else ""
    console.print(
        Text.assemble("\n", READY_LINE_PREFIX, "routes at ", (url, "bold cyan"), f" by {', '.join(policies)}\n"),
        soft_wrap=True,
    )
    start = f"  Start instances with: onward serve --router {url} --port 0{key}"
    for line in (start, "  (for split roles one with --role prefill, one with --role decode)\n", *_look(url)):
        console.print(line, soft_wrap=True, markup=False)


def _own_policies(config: RouterConfig) -> list[tuple[str, str | None]]:
    return [("prefill", config.prefill_policy), ("decode", config.decode_policy)]


def _look(url: str) -> list[str]:
    return [f"  Look at them with: onward status {url}\n"]


def print_next_commands(
    console: Console, model: PreparedModel, frontend_url: str, key_fd: int, *, needs_key: bool
) -> None:
    """Prints what to type next after `onward up`, whose cluster key this process has open as `key_fd`."""
    # The key file has no name, but a user that may trace this process can read it, and that is only its owner.
    key = f"--cluster-key-file /proc/{os.getpid()}/fd/{key_fd}"
    console.print(f"\n  onward status {frontend_url} {key}", soft_wrap=True, markup=False)
    console.print("\n" + curl_example(model, frontend_url, needs_key=needs_key), soft_wrap=True, markup=False)


def curl_example(model: PreparedModel, url: str, *, needs_key: bool = False) -> str:
    """Returns a request that the model can answer: a chat if it has a chat template, else a completion."""
    # A small model with default sampling may ramble without end, so the example has a low temperature and few tokens.
    if model.tokenizer is None:
        path, prompt = "/v1/completions", '"prompt": [1]'
    elif not model.chat_template:
        path, prompt = "/v1/completions", '"prompt": "The capital of France is"'
    else:
        path = "/v1/chat/completions"
        prompt = '"messages": [{"role": "user", "content": "What is 2 + 2?"}]'
    body = f'{{"model": "{model.name}", {prompt}, "temperature": 0.2, "max_tokens": 100}}'
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    return f"  curl {url}{path}{key} -H 'Content-Type: application/json' \\\n       -d '{body}'\n"
