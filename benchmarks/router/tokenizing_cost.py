"""What a router that chooses by cached prefixes does for each prompt: render it, tokenize it, name its blocks."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from onward.proto.block_hash import block_hashes
from onward.proto.model import PreparedModel
from onward.text.chat_template import ChatTemplate
from onward.text.tokenizer import Tokenizer

BLOCK_SIZE = 16
_PASSES = 50
T = TypeVar("T")


class TokenizingCost(msgspec.Struct, frozen=True):
    """Processor time of one request, in milliseconds."""

    num_tokens: int
    template_ms: float
    tokens_ms: float
    block_names_ms: float


def tokenizing_cost(model: PreparedModel, prompt: str) -> TokenizingCost:
    assert model.tokenizer is not None and model.chat_template is not None, "a model that chats"
    tokenizer = Tokenizer.from_file(Path(model.folder) / model.tokenizer)
    template = ChatTemplate(model.chat_template, model.bos_token, model.eos_token)
    messages = [{"role": "user", "content": prompt}]
    rendered, template_ms = _timed(lambda: template.render(messages, created_s=0.0))
    token_ids, tokens_ms = _timed(lambda: tokenizer.encode_chat(rendered))
    _, block_names_ms = _timed(lambda: block_hashes(token_ids, BLOCK_SIZE, ""))
    return TokenizingCost(len(token_ids), template_ms, tokens_ms, block_names_ms)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    result = work()
    began_s = time.process_time()
    for _ in range(_PASSES):
        work()
    return result, (time.process_time() - began_s) / _PASSES * 1000
