"""A tiny int8 model that speaks the simulator's vocabulary, so that its outputs are text, and runs under grammars."""

import math
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from onward.grammar.matcher import TokenBitmask
from onward.proto.sampling_params import Grammar, SamplingParams
from onward.proto.step import AssignSlot, RunSlot, SlotAdvanced, SlotTokens
from onward.sim import vocabulary
from onward.worker.logits_processors.mask_executor import MaskExecutor, NextMask, ThreadedMaskExecutor, compute_inline
from tests.worker import small_int8
from tests.worker.driver import Driver, prepared

CONFIG = msgspec.structs.replace(small_int8.CONFIG, vocab_size=len(vocabulary.token_bytes()))
PROMPT = [5, 9, 11, 2, 60, 33, 8]
END = vocabulary.END_ID
MAX_STEPS = 400


class AtOnce:
    """Every mask is there at once."""

    def submit(self, compute: Callable[[], TokenBitmask], expected_s: float) -> NextMask:
        return compute_inline(compute)


class InThreads:
    """Every mask is made by another thread, and is there when it is there."""

    def __init__(self) -> None:
        self._maker = ThreadedMaskExecutor(2)

    def submit(self, compute: Callable[[], TokenBitmask], expected_s: float) -> NextMask:
        return self._maker.submit(compute, math.inf)


class Held:
    """Masks that are not ready before the test releases them."""

    def __init__(self) -> None:
        self._held: list[tuple[Future[TokenBitmask], Callable[[], TokenBitmask]]] = []

    def submit(self, compute: Callable[[], TokenBitmask], expected_s: float) -> NextMask:
        future: Future[TokenBitmask] = Future()
        self._held.append((future, compute))
        return future

    def release(self) -> None:
        held, self._held = self._held, []
        for future, compute in held:
            future.set_result(compute())


def driver(masks: MaskExecutor | None = None, **settings: Any) -> Driver:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(vocabulary.model_text().tokenizer or "", encoding="utf-8")
        model = msgspec.structs.replace(
            prepared(CONFIG, quantization="int8"), folder=folder, tokenizer="tokenizer.json"
        )
        defaults = {"num_kv_blocks": 64, "max_num_seqs": 8, "max_model_len": 128, "max_num_batched_tokens": 64}
        made = Driver(model, small_int8.arrays(CONFIG), masks, **(defaults | settings))
        made.runner._grammar_compiler.get()  # reads the file
        return made


def sampling(grammar: Grammar | None, **fields: Any) -> SamplingParams:
    return SamplingParams(grammar=grammar, **({"seed": 7, "end_token_ids": (END,)} | fields))


def output(driver: Driver, request: AssignSlot, max_tokens: int = 60, num_drafts: int = 0) -> tuple[list[int], bool]:
    """The whole output, what was given included, and whether its grammar is done."""
    tokens, left = list(request.token_ids[request.num_prompt :]), len(request.token_ids) - request.num_computed
    driver.step(assign=[request])
    for _ in range(MAX_STEPS):
        [event] = driver.step(run=[RunSlot(request.slot, request.slot_epoch, left, [], num_drafts)])
        left = 1
        if isinstance(event, SlotAdvanced):
            continue
        assert isinstance(event, SlotTokens), event
        assert event.position == len(tokens)
        tokens += event.token_ids
        if event.grammar_done or tokens[-1] in request.sampling_params.end_token_ids or len(tokens) >= max_tokens:
            return tokens, event.grammar_done
    raise AssertionError("it does not end")


def resumed(
    driver: Driver, sampling: SamplingParams, given: list[int] | None = None, num_drafts: int = 0
) -> tuple[list[int], bool]:
    token_ids = [*PROMPT, *(given or [])]
    request = driver.assign(0, token_ids, room=64, sampling=sampling, num_prompt=len(PROMPT))
    made = output(driver, request, num_drafts=num_drafts)
    driver.give_back(request.block_ids)
    return made


def text_of(token_ids: list[int]) -> str:
    pieces = vocabulary.token_bytes()
    return b"".join(pieces[token_id] for token_id in token_ids).decode()
