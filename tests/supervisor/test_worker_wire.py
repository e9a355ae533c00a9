"""The wire to a worker is made large enough for whatever the checks of requests let through."""

import msgspec

from onward.api.requests.validation import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS
from onward.config import ServeConfig
from onward.proto.kv_transfer import KvEndpoint, KvPush
from onward.proto.model import ModelConfig, PreparedModel
from onward.proto.reasoning_params import ReasoningParams
from onward.proto.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_GRAMMAR_BYTES,
    Grammar,
    SamplingParams,
)
from onward.proto.step import AssignSlot, RunSlot, StepPlan
from onward.supervisor.worker_wire import shm_wire_for
from onward.text.bad_words import MAX_BAD_WORDS

MAX_MODEL_LEN, BLOCK_SIZE, LARGE = 2048, 16, 2**31 - 1
CONFIG = ModelConfig("llama", LARGE, 64, 64, 2, 4, 4, 16, MAX_MODEL_LEN, 1e-5, 1e4)
MODEL = PreparedModel("m", "/m", CONFIG, "float32", "none", "f", [], None, None, None, None, [])


def largest_assignment(slot: int) -> AssignSlot:
    num_blocks = MAX_MODEL_LEN // BLOCK_SIZE
    per_word = MAX_BAD_WORD_TOKENS // (2 * MAX_BAD_WORDS)
    sampling = SamplingParams(
        seed=LARGE,
        temperature=1.1,
        max_tokens=LARGE,
        end_token_ids=(LARGE,) * (MAX_STOP_TOKEN_IDS + 16),
        logit_bias=((LARGE, 1.1),) * MAX_LOGIT_BIASES,
        bad_words=((LARGE,) * per_word,) * (2 * MAX_BAD_WORDS),
        grammar=Grammar("grammar", "x" * MAX_GRAMMAR_BYTES),
        allowed_token_ids=(LARGE,) * MAX_ALLOWED_TOKEN_IDS,
        reasoning=ReasoningParams((LARGE,), (LARGE,), True, LARGE, (LARGE,) * 16),
    )
    push = KvPush("x" * 64, KvEndpoint("tcp", "x" * 64, "x" * 64), 0, [LARGE] * num_blocks, True)
    tokens, blocks = [LARGE] * MAX_MODEL_LEN, [LARGE] * num_blocks
    return AssignSlot(slot, LARGE, "x" * 256, tokens, LARGE, LARGE, blocks, sampling, push, LARGE, [LARGE] * 16)


def test_a_plan_that_gives_every_slot_the_largest_request_there_can_be_fits() -> None:
    for num_slots in (1, 3):
        config = ServeConfig(max_num_seqs=num_slots, block_size=BLOCK_SIZE)
        assigns = [largest_assignment(slot) for slot in range(num_slots)]
        plan = StepPlan(LARGE, assign=assigns, run=[RunSlot(a.slot, LARGE, LARGE, [LARGE] * 8, 16) for a in assigns])
        assert len(msgspec.msgpack.encode(plan)) <= shm_wire_for(config, MODEL, "worker-1").plan_bytes
