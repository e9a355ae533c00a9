"""Two versions of a model and a canary behind one router, as real processes: each stream is its version's own, whichever
process is killed, and a batch is answered once and exactly."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from onward.bench.model_shapes import write_tokenizer
from onward.proto.model import ModelConfig
from tests.e2e.answers import COMPLETIONS, USAGE, Hearing, Question, ask, ask_again_and_again, whole_answer
from tests.e2e.cluster import SMALL, Cluster
from tests.e2e.pd_instances import wait_for
from tests.models.checkpoints import random_tensors, write_folder
from tests.worker import small_int8

CONFIG: ModelConfig = msgspec.structs.replace(
    small_int8.CONFIG, vocab_size=320, num_layers=8, max_position_embeddings=512
)
VERSIONS = ("m-v1", "m-v2")
ROUTE = ("--route", "m=m-v1:0.5,m-v2:0.5", "--stall-timeout-s", "10", "--restart-grace-s", "3")
PATIENT = ("--preempt-retry-count", "100", "--retry-budget", "10")
"""An instance that dies while it is the only one of its version takes attempts and breaks them off, several in a row."""
MAX_TOKENS = 160
NUM_COPIES = 2
"""Streams of each question."""

Answers = list[dict[str, Any]]


def question(number: int, model: str) -> Question:
    prompt = np.random.default_rng(number).integers(0, CONFIG.vocab_size, 20 + 10 * number).tolist()
    sampled: dict[str, Any] = {"temperature": 0} if number % 2 else {"temperature": 1.5, "seed": number}
    body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True} | sampled
    return Question(f"q{number}", COMPLETIONS, body | (USAGE if number < 6 else {}))


NUMBERS = range(8)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    root = tmp_path_factory.mktemp("versions")
    for index, name in enumerate(VERSIONS):
        tensors = random_tensors(CONFIG)
        for array in tensors.values():
            array[:] = np.roll(array, index, axis=0)
        write_folder(root / name, CONFIG, tensors)
        write_tokenizer(root / name, CONFIG.vocab_size)
    flags = [(str(root / name), "--quantization", "int8") for name in VERSIONS]
    with Cluster(
        router=(*ROUTE, *PATIENT), every=SMALL, prefill=(), decode=(), mixed=(flags[0], flags[0], flags[1])
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> dict[str, Answers]:
    """By the version: an instance's own answers, undisturbed and without a router."""

    async def run(url: str, model: str) -> Answers:
        async with httpx.AsyncClient(base_url=url, timeout=180) as client:
            return [await ask(client, question(number, model)) for number in NUMBERS]

    by_version = dict(zip(VERSIONS, (cluster.instances[0], cluster.instances[2]), strict=True))
    answers = {model: asyncio.run(run(instance.url, model)) for model, instance in by_version.items()}
    assert all(one != other for one, other in zip(*answers.values(), strict=True)), "the versions say different things"
    return answers


@pytest.mark.timeout(900)
def test_every_stream_is_its_versions_own_whatever_is_killed(cluster: Cluster, expected: dict[str, Answers]) -> None:
    cluster.heal()
    asked = [question(number, "m") for _ in range(NUM_COPIES) for number in NUMBERS]
    hearings = [Hearing() for _ in asked]

    def disturb() -> None:
        _wait_for_tokens(hearings, 100)
        cluster.instances[0].kill("worker")
        _wait_for_tokens(hearings, 300)
        cluster.instances[1].kill("engine")
        _wait_for_tokens(hearings, 600)
        # The only one of its version: its streams wait for it, and do not go to the other version.
        cluster.instances[2].kill("instance")
        cluster.instances[2].start_again()
        cluster.wait_until_ready(cluster.instances[2])
        cluster.router.kill()
        cluster.router.start_again()

    async def run() -> list[tuple[dict[str, Any], int]]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=180) as client, asyncio.TaskGroup() as group:
            asking = [
                group.create_task(ask_again_and_again(client, one, hearing))
                for one, hearing in zip(asked, hearings, strict=True)
            ]
            await asyncio.to_thread(disturb)
        return [one.result() for one in asking]

    told = [answer for answer, _ in asyncio.run(run())]
    for number, answer in zip([*NUMBERS] * NUM_COPIES, told, strict=True):
        assert answer == expected[answer["model"]][number]
    assert Counter(answer["model"] for answer in told).keys() == {*VERSIONS}


def _wait_for_tokens(hearings: list[Hearing], count: int) -> None:
    wait_for(lambda: sum(len(c.token_ids) for h in hearings for c in list(h.choices.values())) >= count, "tokens")


def test_models_are_listed_and_an_unknown_one_is_named(cluster: Cluster) -> None:
    cluster.heal()
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["m", *VERSIONS]
        refused = client.post(COMPLETIONS, json=question(6, "m-v3").body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")
    shown = {one["url"]: one["model"] for one in cluster.router.status()["instances"]}
    assert [shown[instance.url] for instance in cluster.instances] == ["m-v1", "m-v1", "m-v2"]


def test_a_batch_survives_the_loss_of_an_instance_and_of_the_router(
    cluster: Cluster, expected: dict[str, Answers], tmp_path: Path
) -> None:
    cluster.heal()
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked = {
        f"{model}-{copy}-{number}": question(number, model)
        for model in ("m", *VERSIONS)
        for copy in range(3)
        for number in NUMBERS
    }
    with source.open("w") as file:
        for custom_id, one in asked.items():
            body = {name: value for name, value in one.body.items() if name not in USAGE}
            line = {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body}
            file.write(json.dumps(line) + "\n")
    command = [sys.executable, "-m", "onward.cli.main", "run-batch", "--url", cluster.url, "--concurrency", "16"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([*command, str(source), str(output)], env=environment, stderr=subprocess.PIPE) as batch:
        watchdog = threading.Timer(400, batch.kill)
        watchdog.start()
        try:
            _wait_for_lines(output, 8)
            cluster.instances[0].kill("instance")
            _wait_for_lines(output, 16)
            cluster.router.kill()
            cluster.router.start_again()
            cluster.instances[0].start_again()
            _, messages = batch.communicate()
        finally:
            watchdog.cancel()
    assert batch.returncode == 0, messages.decode()
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(one["custom_id"] for one in answers) == sorted(asked), "one answer for each, and one only"
    for one in answers:
        number = int(one["custom_id"].rpartition("-")[2])
        answer = whole_answer(one["response"]["body"])
        if number >= 6:
            assert answer == expected[answer["model"]][number]
        else:
            [choice], [heard] = answer["choices"], expected[answer["model"]][number]["choices"]
            assert choice["text"] == heard["said"]


def _wait_for_lines(path: Path, count: int) -> None:
    wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") >= count, f"{count} answers")
