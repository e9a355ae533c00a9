"""Each `onward` command in a deploy file is one: its flags exist, and its configuration is accepted."""

import argparse
from typing import Any

import pytest

from onward.cli import router, serve
from onward.cli.flags import from_args
from onward.cli.main import build_parser
from onward.config import RouterConfig, ServeConfig
from tests.deploy.manifests import OnwardCommand, onward_commands


def parsed(command: OnwardCommand) -> argparse.Namespace:
    name = command.words[0]
    parser, parsers = build_parser([name])
    parsers[name].check_flags(list(command.words[1:]))
    return parser.parse_args(list(command.words))


@pytest.mark.parametrize("command", onward_commands(), ids=lambda command: command.where)
def test_every_flag_of_a_deploy_file_is_one_and_the_configuration_is_accepted(command: OnwardCommand) -> None:
    args: Any = parsed(command)
    match command.words[0]:
        case "serve" if "cuda" not in command.words:
            serve.check(from_args(args, ServeConfig))
        case "router":
            router.check(from_args(args, RouterConfig))


def test_all_deploy_files_were_looked_at() -> None:
    kinds = {command.where.partition(" ")[0] for command in onward_commands()}
    assert {"onward-router", "onward-mixed", "onward-tensor-parallel", "onward-prefill", "onward-decode"} <= kinds
    assert {"compose", "Dockerfile", "onward.service", "onward-router.service"} <= kinds


def test_an_unknown_flag_is_found() -> None:
    with pytest.raises(SystemExit):
        parsed(OnwardCommand("here", ("serve", "--no-such-flag=1")))
