import argparse
import re
import signal
import subprocess
import sys
import threading

import pytest

from onward.cli import router
from onward.cli.flags import from_args
from onward.cli.main import run
from onward.cli.router import check
from onward.config import RouterConfig
from onward.errors import StartupError


def parse(*argv: str) -> RouterConfig:
    parser = argparse.ArgumentParser()
    router.add_arguments(parser)
    return from_args(parser.parse_args(argv), RouterConfig)


def test_flags_set_the_knobs_of_the_same_name() -> None:
    assert parse() == RouterConfig()
    config = parse("--policy", "prefix", "--preempt-retry-exclude-decode", "--retry-budget", "0.5", "--port", "0")
    assert (config.policy, config.preempt_retry_exclude_decode) == ("prefix", True)
    assert (config.retry_budget, config.port) == (0.5, 0)


def test_a_policy_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--decode-policy", "lucky")
    assert "--decode-policy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (RouterConfig(port=70000), "--port 70000"),
        (RouterConfig(max_queue=0), "--max-queue"),
        (RouterConfig(max_body_bytes=0), "--max-body-bytes"),
        (RouterConfig(max_connections=0), "--max-connections"),
        (RouterConfig(preempt_retry_count=-1), "--preempt-retry-count"),
        (RouterConfig(retry_budget=-0.1), "--retry-budget"),
        (RouterConfig(stall_timeout_s=0), "--stall-timeout-s"),
        (RouterConfig(stall_timeout_s=float("nan")), "--stall-timeout-s"),
        (RouterConfig(restart_grace_s=-1), "--restart-grace-s"),
        (RouterConfig(detach_ttl_s=float("inf")), "--detach-ttl-s"),
        (RouterConfig(request_timeout_s=0), "--request-timeout-s"),
        (RouterConfig(drain_s=-1), "--drain-s"),
        (RouterConfig(log_level="loud"), "--log-level"),
        (RouterConfig(instances="http://127.0.0.1:1,gpu7"), "--instances.*'gpu7'"),
        (RouterConfig(instances="http://192.0.2.7:1"), "--instances.*--cluster-key-file"),
        (RouterConfig(host="0.0.0.0"), "--host 0.0.0.0.*--cluster-key-file"),
    ],
)
def test_what_cannot_work_is_named(config: RouterConfig, named: str) -> None:
    with pytest.raises(StartupError, match=named):
        check(config)


@pytest.mark.parametrize(
    "config",
    [
        RouterConfig(),
        RouterConfig(preempt_retry_count=0, retry_budget=0, restart_grace_s=0, detach_ttl_s=0),
        RouterConfig(host="0.0.0.0", cluster_key_file="k", instances="http://192.0.2.7:1", api_key=("k",)),
        RouterConfig(instances="http://127.0.0.1:1, http://localhost:2"),
    ],
)
def test_what_can_work_is_let_through(config: RouterConfig) -> None:
    check(config)


def test_a_fault_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["router", "--max-queue", "0"]) == 1
    assert capsys.readouterr().err == "onward router: --max-queue must be at least 1\n"


def test_it_says_where_it_is_can_be_looked_at_and_leaves_when_told(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "onward.cli.main", "router", "--port", "0", "--policy", "session"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            found = next(
                filter(None, (re.search(r"Onward routes at (\S+) by session", line) for line in process.stdout))
            )
            assert run(["status", found.group(1)]) == 0
            assert "no instance has registered" in capsys.readouterr().out
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
        finally:
            process.kill()
            watchdog.cancel()
