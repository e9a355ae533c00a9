import argparse
import dataclasses
from typing import Any

import pytest

from onward.cli import flag_groups
from onward.cli.flags import add_flags, from_args
from onward.cli.main import COMMANDS, build_parser, did_you_mean, run
from onward.cli.serve import check, listen
from onward.config import (
    ApiConfig,
    EngineConfig,
    HttpServerConfig,
    RouterConfig,
    ServeConfig,
    WorkerConfig,
    derive_config,
)
from onward.errors import StartupError

PROMISED = {
    *("--host", "--port", "--model", "--served-model-name", "--dtype", "--quantization", "--max-model-len"),
    *("--block-size", "--num-kv-blocks", "--max-num-seqs", "--max-num-batched-tokens", "--transport", "--threads"),
    *("--api-processes", "--cors-origin"),
}


def parse(*argv: str) -> ServeConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser, ServeConfig)
    return from_args(parser.parse_args(argv), ServeConfig)


def test_what_is_not_said_keeps_its_default() -> None:
    assert parse() == ServeConfig()


def test_flags_set_the_knobs_of_the_same_name() -> None:
    config = parse("--port", "0", "--dtype", "bfloat16", "--cors-origin", "a", "--cors-origin", "b", "--drain-s", "0.5")
    assert (config.port, config.dtype, config.cors_origin, config.drain_s) == (0, "bfloat16", ("a", "b"), 0.5)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], False),
        (["--device", "cuda"], True),
        (["--device", "cuda", "--no-deterministic"], False),
        (["--device", "cuda", "--quantization", "fp8"], False),
        (["--device", "cuda", "--dtype", "float32"], False),
        (["--device", "cuda", "--dtype", "float16"], False),
        (["--device", "cuda", "--dtype", "bfloat16"], True),
        (["--device", "cuda", "--quantization", "fp8", "--deterministic"], True),  # refused later, with the reason
    ],
    ids=str,
)
def test_deterministic_is_the_default_where_cuda_kernels_support_it(argv: list[str], expected: bool) -> None:
    assert parse(*argv).deterministic is expected


def test_all_promised_flags_exist_and_the_help_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["serve", "--help"])
    shown = capsys.readouterr().out
    assert not [flag for flag in PROMISED if flag not in shown]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--block-size", "0"], "--block-size"),
        (["--instance-name", "a b"], "--instance-name 'a b'"),
        (["--instance-name", ""], "--instance-name ''"),
        (["--num-kv-blocks", "-1"], "--num-kv-blocks"),
        (["--block-size", "65536"], "--block-size 65536"),
        (["--threads", "100000"], "--threads 100000"),
        (["--host", ""], "--host must not be empty"),
        (["--model", ""], "--model must not be empty"),
        (["--served-model-name", ""], "--served-model-name must not be empty"),
        (["--max-queue-tokens", "0"], "--max-queue-tokens"),
        (["--max-num-batched-tokens", "8"], "--max-num-batched-tokens"),
        (["--max-body-bytes", "0"], "--max-body-bytes"),
        (["--stall-timeout-s", "0"], "--stall-timeout-s 0 must be above 1"),
        (["--stall-timeout-s", "nan"], "--stall-timeout-s"),
        (["--drain-s", "inf"], "--drain-s"),
        (["--detach-ttl-s", "-1"], "--detach-ttl-s"),
        (["--max-body-bytes", "-1"], "--max-body-bytes"),
        (["--api-processes", "0"], "--api-processes 0 is not within 1 to 64"),
        (["--api-processes", "100000"], "--api-processes 100000 is not within 1 to 64"),
        (["--stall-timeout-s", "-1"], "--stall-timeout-s"),
        (["--drain-s", "-5"], "--drain-s"),
        (["--log-interval-s", "nan"], "--log-interval-s"),
        (["--log-level", "loud"], "--log-level 'loud' is not one of debug, info, warning, error"),
        (["--kv-port", "70000"], "--kv-port 70000"),
        (["--cors-origin", "localhost:3000"], "--cors-origin 'localhost:3000' is not an origin"),
        (["--cors-origin", "http://localhost:3000/"], "--cors-origin 'http://localhost:3000/' is not an origin"),
        (["--cors-origin", "https://a@example.com"], "'https://a@example.com' is not an origin"),
        (
            ["--cors-origin", "https://bücher.example"],
            "is not an origin: its host is neither a name in ASCII nor an address",
        ),
        (["--allowed-host", "faß.example"], "is not a host name: write it in its ASCII form"),
        (["--allowed-host", "example.com:8000"], "is not a host name"),
        (["--allowed-host", "localhost]"], "is not a host name"),
        (["--record-tokens"], "--record-tokens is about --record"),
        (["--prefill-peers", "gpu7"], "--prefill-peers: 'gpu7'"),
        (["--step-log", "/dev/null/steps"], "--step-log /dev/null/steps"),
        (["--speculative", "medusa:4"], "--speculative medusa:4: medusa is not a proposer"),
    ],
)
def test_values_that_cannot_work_are_named(flags: list[str], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        check(parse(*flags))


def test_a_block_size_that_no_worker_takes_is_refused_before_anything_is_fetched() -> None:
    with pytest.raises(StartupError, match="--block-size 24 is not a multiple of 16"):
        check(parse("--block-size", "24"))


def test_a_mistake_names_the_flag_that_may_be_meant() -> None:
    assert did_you_mean("--prot", ["--port", "--model"]) == " (did you mean --port?)"
    assert did_you_mean("--zzz", ["--port", "--model"]) == ""


def test_every_knob_is_in_one_group_of_the_help_and_the_first_has_ten() -> None:
    for config, groups in ((ServeConfig, flag_groups.SERVE), (RouterConfig, flag_groups.ROUTER)):
        grouped = [name for group in groups.values() for name in group]
        assert sorted(grouped) == sorted(knob.name for knob in dataclasses.fields(config))
    assert len(next(iter(flag_groups.SERVE.values()))) == 10


def test_a_setting_that_serve_and_router_share_is_declared_once() -> None:
    shared = {field.name for field in dataclasses.fields(HttpServerConfig)}
    declared = [
        {(field.name, field.default, field.metadata["help"]) for field in dataclasses.fields(config)}
        for config in (ServeConfig, RouterConfig)
    ]
    assert {name for name, *_ in declared[0] & declared[1]} == shared
    for config in (ServeConfig, RouterConfig):
        assert not shared & config.__annotations__.keys()


@pytest.mark.parametrize(
    ("process", "set_by_the_supervisor"),
    [
        (EngineConfig, {"prefill_peers": (), "kv_checksums": False}),
        (WorkerConfig, {"kv_backend": None}),
        (ApiConfig, {}),
    ],
)
def test_a_process_has_the_defaults_of_serve(process: type[Any], set_by_the_supervisor: dict[str, Any]) -> None:
    assert process() == derive_config(ServeConfig(), process, **set_by_the_supervisor)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["serve", "--prot", "9"],
            "onward serve: there is no flag --prot (did you mean --port?); see onward serve --help",
        ),
        (["serve", "--max-seqs=3"], "onward serve: there is no flag --max-seqs (did you mean --max-num-seqs?)"),
        (["bench", "--streems", "3"], "onward bench: there is no flag --streems (did you mean --streams?)"),
        (["serve", "--zzz"], "onward serve: there is no flag --zzz; see"),
        (["serv"], "onward: there is no command serv (did you mean serve?)"),
        (["serve", "--port", "x"], "onward serve: argument --port: invalid int value: 'x'"),
        (["status"], "onward status: the following arguments are required: URL"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_that_names_what_may_be_meant(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(argv)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


@pytest.mark.parametrize("origin", ["*", "http://localhost:3000", "https://example.com", "chrome-extension://abc"])
def test_origins_are_taken_as_browsers_send_them(origin: str) -> None:
    check(parse("--cors-origin", origin))


@pytest.mark.parametrize(
    ("origin", "sent"),
    [
        ("https://Example.com", "https://example.com"),
        ("HTTPS://example.com", "https://example.com"),
        ("https://example.com:443", "https://example.com"),
        ("http://[0::1]:80", "http://[::1]"),
        ("http://localhost:03000", "http://localhost:3000"),
    ],
)
def test_an_origin_that_no_browser_sends_is_refused_with_the_one_that_they_do(origin: str, sent: str) -> None:
    with pytest.raises(StartupError) as refused:
        check(parse("--cors-origin", origin))
    assert str(refused.value) == f"--cors-origin {origin!r} is not spelled as browsers send it, which is {sent}"
    check(parse("--cors-origin", sent))


def test_an_address_that_this_machine_does_not_have_is_no_fault_of_the_port() -> None:
    with pytest.raises(
        StartupError, match=r"cannot listen on 192\.0\.2\.7:0: .* an address of this machine with --host"
    ):
        listen("192.0.2.7", 0, "--port")


def test_some_knobs_have_another_default_on_a_cuda_device() -> None:
    plain, cuda, said = parse(), parse("--device", "cuda"), parse("--device", "cuda", "--max-num-seqs", "5")
    assert (plain.max_num_seqs, plain.max_num_batched_tokens) == (64, 192)
    assert (cuda.max_num_seqs, cuda.max_num_batched_tokens) == (256, 8192)
    assert (said.max_num_seqs, said.max_num_batched_tokens) == (5, 8192)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--role", "decode"], "cannot exchange KV"),
        (["--prefill-peers", "tcp://127.0.0.1:1"], "cannot exchange KV"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization 1.5"),
        (["--speculative", "ngram:4"], "--speculative ngram:4 is for --device cpu"),
    ],
)
def test_what_a_cuda_device_cannot_do_is_refused_before_anything_is_loaded(flags: list[str], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        check(parse("--device", "cuda", *flags))


def test_the_help_of_every_command_says_what_it_does_and_explains_every_argument() -> None:
    _, parsers = build_parser(COMMANDS)
    remaining = list(parsers.values())
    while remaining:
        parser = remaining.pop()
        assert parser.description, parser.prog
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                remaining.extend(action.choices.values())
            else:
                assert action.help, f"{parser.prog}: {action.dest}"
