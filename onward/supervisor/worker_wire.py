"""Makes the wire for a worker incarnation: an address, or shared memory that is large enough for every possible
step."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from onward.config import ServeConfig
from onward.proto.model import PreparedModel
from onward.proto.sampling_params import MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORD_TOKENS, MAX_GRAMMAR_BYTES
from onward.proto.speculative_config import num_draft_tokens_of
from onward.proto.step import MAX_PROMPT_LOGPROB_ROWS
from onward.proto.worker_wire_address import ShmWireAddress, WorkerWireAddress, ZmqWireAddress
from onward.transport import shm_wire
from onward.transport.curve import make_private_address

BYTES_PER_INTEGER = 5
"""Upper bound for a token or block id in msgpack."""
BYTES_PER_REQUEST = 1 << 15
"""Upper bound for the rest of an assignment: ids, sampling parameters, and the short lists in it."""
BYTES_PER_FAILURE = 1 << 12
MAX_LOGPROBS = 20
BYTES_PER_LOGPROB = 16
BYTES_PER_NUMBER = 4


@dataclass(slots=True, frozen=True)
class WorkerWireEnds:
    """A wire as each side gets it, with the file descriptors for that side."""

    for_engine: WorkerWireAddress
    for_worker: WorkerWireAddress
    engine_fds: tuple[int, ...] = ()
    worker_fds: tuple[int, ...] = ()


@contextmanager
def open_worker_wire(
    config: ServeConfig, model: PreparedModel, engine_incarnation: str, worker_incarnation: str
) -> Iterator[WorkerWireEnds]:
    """Opens a wire. Its file descriptors are closed when the context ends; a process that they were sent to has
    copies."""
    if config.transport == "zmq":
        # The name contains both incarnations, so a message for another pair can never arrive there.
        engine_address, worker_address = make_private_address(f"{engine_incarnation}-{worker_incarnation}")
        yield WorkerWireEnds(ZmqWireAddress(engine_address), ZmqWireAddress(worker_address))
        return
    wire = shm_wire_for(config, model, worker_incarnation)
    memory_fd, engine_bell, worker_bell = shm_wire.create_ring(wire)
    try:
        inherited = msgspec.structs.replace(wire, memory_fd=memory_fd, doorbell_fd=worker_bell.fileno())
        yield WorkerWireEnds(wire, inherited, (memory_fd, engine_bell.fileno()), (memory_fd, worker_bell.fileno()))
    finally:
        os.close(memory_fd)
        engine_bell.close()
        worker_bell.close()


def shm_wire_for(config: ServeConfig, model: PreparedModel, worker_incarnation: str) -> ShmWireAddress:
    max_model_len = config.max_model_len or model.config.max_position_embeddings
    blocks_per_request = max_model_len // config.block_size + 1
    # Tokens, own blocks, blocks of a peer that the KV is pushed to, bad words, and the only tokens that are allowed.
    ids_per_request = max_model_len + 2 * blocks_per_request + MAX_BAD_WORD_TOKENS + MAX_ALLOWED_TOKEN_IDS
    # A failure, or an embedding vector.
    bytes_per_side = BYTES_PER_FAILURE + model.config.hidden_size * BYTES_PER_NUMBER
    num_drafts = num_draft_tokens_of(config.speculative)
    # One token for each slot, or several with drafts, but not more than a step has rows.
    max_tokens = min(config.max_num_seqs * (1 + num_drafts), max(config.max_num_seqs, config.max_num_batched_tokens))
    max_logprobs = MAX_PROMPT_LOGPROB_ROWS + max_tokens
    return ShmWireAddress(
        incarnation=worker_incarnation,
        num_slots=config.max_num_seqs,
        max_tokens_per_row=1 + num_drafts,
        plan_bytes=config.max_num_seqs * (ids_per_request * BYTES_PER_INTEGER + BYTES_PER_REQUEST + MAX_GRAMMAR_BYTES),
        extras_bytes=max_logprobs * (MAX_LOGPROBS + 2) * BYTES_PER_LOGPROB + config.max_num_seqs * bytes_per_side,
    )
