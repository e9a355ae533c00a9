"""`onward bench` against a real server that streams what the test says."""

import argparse
import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onward.cli import bench, main
from onward.errors import OnwardError
from tests.bench.sse_server import DONE, chunk, serving, usage


def run_bench(url: str, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["--url", url, *arguments]))


async def _answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
    chat = "messages" in body
    text = body["messages"][0]["content"] if chat else body["prompt"]
    yield chunk("", chat=chat)
    for _ in range(body["max_tokens"] // 2):  # two tokens in each event
        yield chunk("word ", chat=chat)
    yield usage(len(text.split()) + 30, body["max_tokens"], cached=2)
    yield DONE


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_figures_of_a_run_are_printed_and_written(
    endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out" / "bench.json"
    with serving(_answer) as server:
        arguments = ["--streams", "3", "--requests", "7", "--output-tokens", "10", "--prompt-tokens", "110"]
        assert run_bench(server.url, *arguments, "--endpoint", endpoint, "--json", str(file)) == 0
    asked = server.bodies[2:]
    assert len(asked) == 7
    assert {body["max_tokens"] for body in asked} == {10}
    assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in asked)
    assert all(path.endswith("chat/completions" if endpoint == "chat" else "v1/completions") for path in server.paths)
    written = msgspec.json.decode(file.read_bytes())
    summary = written["summary"]
    assert (summary["num_requests"], summary["num_failed"], summary["output_tokens"]) == (7, 0, 70)
    assert (summary["prompt_tokens"], summary["cached_tokens"]) == (7 * 110, 14)
    assert summary["tokens_per_event"] == 2.0
    assert summary["output_tokens_per_s"] == pytest.approx(70 / summary["duration_s"])
    assert written["environment"]["cpu_cores"] >= 1
    assert len(written["requests"]) == 7 and all(len(r["text_s"]) == 5 for r in written["requests"])
    assert written["target"]["model"] == "tiny"
    printed = capsys.readouterr().out
    assert "output tokens/s" in printed and "time to first token" in printed and "time per output token" in printed


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_tokens_of_the_reasoning_are_measured_as_those_of_the_answer(field: str, tmp_path: Path) -> None:
    async def think(body: dict[str, Any]) -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b'data: {"choices": [{"index": 0, "delta": {"%s": "hm "}}]}\n\n' % field.encode()
        yield chunk("word ")
        yield usage(30, 4)
        yield DONE

    file = tmp_path / "bench.json"
    with serving(think) as server:
        assert run_bench(server.url, "--requests", "2", "--streams", "1", "--json", str(file)) == 0
    written = msgspec.json.decode(file.read_bytes())
    assert [len(request["text_s"]) for request in written["requests"]] == [4, 4]
    assert written["summary"]["tokens_per_event"] == 1.0


def test_each_run_has_prompts_of_its_own_unless_a_seed_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"

    def prompts(*arguments: str) -> list[str]:
        with serving(_answer) as server:
            flags = ["--requests", "3", "--streams", "1", "--output-tokens", "2", "--json", str(file)]
            assert run_bench(server.url, *flags, *arguments) == 0
        return [body["messages"][0]["content"] for body in server.bodies[-3:]]

    first, second = prompts(), prompts()
    assert not {*first} & {*second}
    seed = msgspec.json.decode(file.read_bytes())["asked"]["seed"]
    assert f"seed {seed}" in " ".join(capsys.readouterr().out.split())
    assert prompts("--seed", seed) == second


def test_as_many_streams_run_at_once_as_were_asked_for() -> None:
    open_now, most = 0, 0
    all_here = asyncio.Event()

    async def together(body: dict[str, Any]) -> AsyncIterator[bytes]:
        nonlocal open_now, most
        if body["max_tokens"] > 1:  # a probe comes alone
            open_now += 1
            most = max(most, open_now)
            if open_now == 4:
                all_here.set()
            await asyncio.wait_for(all_here.wait(), 20)
            open_now -= 1
        yield chunk("a")
        yield usage(30, body["max_tokens"])
        yield DONE

    with serving(together) as server:
        assert run_bench(server.url, "--streams", "4", "--requests", "12", "--output-tokens", "2") == 0
    assert most == 4


async def _failing(body: dict[str, Any]) -> AsyncIterator[bytes]:
    if body["max_tokens"] == 1:
        yield usage(30, 1)
        yield DONE
        return
    yield chunk("a")
    first = body["messages"][0]["content"].split()[0]
    if len(first) % 2:
        yield b'data: {"error": {"message": "out of luck", "code": "internal_error"}}\n\n'
        yield DONE
    # Otherwise the stream just ends: neither usage nor [DONE].


def test_streams_that_fail_are_counted_by_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    with serving(_failing) as server:
        assert run_bench(server.url, "--streams", "2", "--requests", "30", "--json", str(file)) == 1
    summary = msgspec.json.decode(file.read_bytes())["summary"]
    assert summary["num_failed"] == 30 == sum(summary["errors"].values())
    assert set(summary["errors"]) == {"out of luck", "the stream broke off before [DONE]"}
    assert "out of luck" in capsys.readouterr().out


async def _without_usage(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield chunk("a")
    yield DONE


def test_a_server_that_reports_no_usage_cannot_be_measured() -> None:
    with serving(_without_usage) as server, pytest.raises(OnwardError, match="did not report usage"):
        run_bench(server.url)


def test_an_unknown_model_is_said_by_the_server() -> None:
    with serving(_answer) as server, pytest.raises(OnwardError, match="404: no such model"):
        run_bench(server.url, "--model", "other")


def test_without_a_server_one_line_says_what_to_do(unused_port: int) -> None:
    with pytest.raises(OnwardError, match="make serve"):
        run_bench(f"http://127.0.0.1:{unused_port}")


@pytest.mark.parametrize("flag", ["--streams", "--requests", "--prompt-tokens", "--output-tokens"])
def test_a_number_below_one_is_refused(flag: str) -> None:
    with pytest.raises(OnwardError, match=f"{flag} must be at least 1"):
        run_bench("http://127.0.0.1:1", flag, "0")


@pytest.mark.parametrize("url", ["foo", "ftp://x", "http://127.0.0.1:99999"])
def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(OnwardError, match=f"--url '{url}' is not an address"):
        run_bench(url, "--model", "tiny")


def test_a_file_for_figures_that_cannot_be_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with serving(_answer) as server, pytest.raises(OnwardError, match="cannot write --json"):
        run_bench(server.url, "--json", str(tmp_path / "file" / "below" / "figures"))
    assert server.bodies == []


def test_the_usage_shows_two_ways_of_which_one_needs_no_further_word(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.run(["bench", "--help"])
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert (first, second.strip()) == ("usage: onward bench [options]", "onward bench offline MODEL [options]")
    with pytest.raises(SystemExit):
        main.run(["bench", "offline", "--help"])
    assert capsys.readouterr().out.startswith("usage: onward bench offline [-h]")


SMALL = ("--streams", "2", "--requests", "3", "--output-tokens", "8")


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_a_run_can_be_drawn(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / "charts" / f"run{suffix}"
    with serving(_answer) as server:
        assert run_bench(server.url, *SMALL, "--plot", str(file)) == 0
    drawn = file.read_text()
    for title in ("time to first token", "between tokens", "output tokens per second", "tiny at http"):
        assert title in drawn
    assert ("output tokens: 24" in drawn) == (suffix == ".html")


def test_two_servers_are_measured_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []

    def answer_as(name: str) -> Any:
        async def answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
            order.append(name)
            async for part in _answer(body):
                yield part

        return answer

    files = tmp_path / "compared.json", tmp_path / "compared.svg"
    with serving(answer_as("A")) as a, serving(answer_as("B")) as b:
        flags = ["--compare", b.url, "--api-key", "secret-of-a", "--compare-api-key", "secret-of-b"]
        assert run_bench(a.url, *SMALL, *flags, "--json", str(files[0]), "--plot", str(files[1])) == 0
    runs = [name for index, name in enumerate(order) if index == 0 or order[index - 1] != name]
    assert runs == ["A", "B"] * 5
    assert {*a.keys} == {"Bearer secret-of-a"} and {*b.keys} == {"Bearer secret-of-b"}
    prompts = [sorted(body["messages"][0]["content"] for body in server.bodies) for server in (a, b)]
    assert prompts[0] == prompts[1], "both servers of a pair get the same prompts"
    assert len({*prompts[0]}) == len(prompts[0]), "and no prompt comes twice"
    written = msgspec.json.decode(files[0].read_bytes())
    assert (len(written["pairs"]), len(written["targets"])) == (5, 2)
    assert "secret" not in files[0].read_text()
    [row] = [row for row in written["ratios"] if row["figure"] == "requests/s"]
    assert row["lowest"] <= row["ratio"] <= row["highest"]
    printed = capsys.readouterr().out
    assert "A : B" in printed and "lowest" in printed and "pair 5 of 5" in printed
    assert ">A<" in files[1].read_text() and ">B<" in files[1].read_text()


def test_without_a_key_of_its_own_the_second_server_gets_none() -> None:
    with serving(_answer) as a, serving(_answer) as b:
        assert run_bench(a.url, *SMALL, "--compare", b.url, "--api-key", "secret-of-a") == 0
    assert {*b.keys} == {None}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--plot", "run.png"], "--plot run.png must end with .svg or .html"),
        (["--compare", "http://127.0.0.1:1", "--pairs", "4"], "--pairs must be at least 5"),
        (["--pairs", "6"], "--pairs is about --compare URL"),
        (["--compare-model", "x"], "--compare-model is about --compare URL"),
        (["--compare", "nowhere"], "--compare 'nowhere' is not an address"),
        (["--plot", "/dev/null/x.svg"], "cannot write --plot /dev/null/x.svg"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_measured(arguments: list[str], problem: str) -> None:
    with pytest.raises(OnwardError, match=re.escape(problem)):
        run_bench("http://127.0.0.1:9", *arguments)
