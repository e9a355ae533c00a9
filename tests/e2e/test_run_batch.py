"""`onward run-batch` with the real model: the server is its own, started for the batch and gone after it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from openai.types.chat import ChatCompletion

COMMAND = [
    sys.executable,
    "-m",
    "onward.cli.main",
    "run-batch",
    "--num-kv-blocks",
    "200",
    "--served-model-name",
    "tiny",
]


def line(number: int) -> str:
    question = [{"role": "user", "content": f"Say {number}."}]
    body = {"model": "tiny", "messages": question, "max_tokens": 8, "temperature": 0}
    return json.dumps({"custom_id": f"q{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})


@pytest.mark.full
def test_a_batch_is_answered_without_a_server_and_gone_on_with(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(line(number) + "\n" for number in range(4)))
    command = [*COMMAND, str(source), str(out)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    subprocess.run(command, check=True, timeout=240, env=environment)
    answers = [json.loads(one) for one in out.read_text().splitlines()]
    assert sorted(one["custom_id"] for one in answers) == ["q0", "q1", "q2", "q3"]
    assert all(ChatCompletion.model_validate(one["response"]["body"]).choices for one in answers)
    kept = out.read_bytes()
    done = subprocess.run(command, check=True, timeout=240, env=environment, capture_output=True, text=True)
    assert out.read_bytes() == kept and "loading" not in done.stderr, "nothing is left, so no server is started"
