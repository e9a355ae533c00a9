"""A model of the hub, with a tokenizer that had to be built and without a template, behind real processes."""

import json
from pathlib import Path

import pytest

from onward.cli.main import run
from tests.e2e.server import Server
from tests.models.checkpoints import random_tensors, tiny_config, write_folder
from tests.models.hub_server import COMMIT, Hub, serve
from tests.models.test_tokenizer_files import RANKS

MODEL_ID = "tiny-labs/tiny-from-hub"
CONFIG = tiny_config(vocab_size=320, hidden_size=64, intermediate_size=128, head_dim=16)


def test_a_model_of_the_hub_is_served_and_not_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "served", CONFIG, random_tensors(CONFIG))
    (folder / "tokenizer.model").write_bytes(RANKS)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with serve(Hub(MODEL_ID, folder)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with Server("--model", MODEL_ID, "--revision", COMMIT, "--num-kv-blocks", "64") as server:
            assert "chat is disabled: the model has no chat template" in server.log()
            body = {"model": MODEL_ID, "prompt": "ab", "max_tokens": 4, "temperature": 0}
            status, answer = server.post("/v1/completions", body)
            assert (status, answer["usage"]["prompt_tokens"]) == (200, 1), "one token, by the ranks' only merge"
            status, answer = server.post(
                "/v1/chat/completions", {"model": MODEL_ID, "messages": [{"role": "user", "content": "hi"}]}
            )
            assert status == 400 and "chat is disabled" in answer["error"]["message"]
            assert run(["models", "prune", MODEL_ID, "--yes"]) == 1
            assert f"{MODEL_ID} is in use" in capsys.readouterr().err
        assert run(["models", "list", "--json"]) == 0
        [entry] = [model for model in json.loads(capsys.readouterr().out) if model["name"] == MODEL_ID]
        assert not entry["is_in_use"]
        assert run(["models", "prune", MODEL_ID, "--yes"]) == 0
        assert not Path(entry["path"]).exists()
