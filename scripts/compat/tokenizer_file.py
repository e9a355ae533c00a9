"""Writes the tokenizer of the served model to a folder, for clients that tokenize on their side."""

import json
from pathlib import Path

from onward.models.loader import model_store
from onward.text.prompt_tokenizer import read_tokenizer_files


def write_tokenizer(model: str, folder: Path) -> None:
    """As `transformers` reads it: `tokenizer.json` and `tokenizer_config.json`."""
    files = read_tokenizer_files(model_store.prepare(model))
    assert files.tokenizer is not None
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": files.bos_token,
        "eos_token": files.eos_token,
        "chat_template": files.chat_template,
    }
    (folder / "tokenizer.json").write_text(files.tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
