"""Deliberate bugs for the simulator beside those of `tests/sabotage/table.py`: no single test can show these."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from onward.api.endpoints.embeddings import EmbeddingService, PreparedEmbedding
from onward.api.engine_link.request_tracker import (
    EPOCHS_PER_ATTEMPT,
    ChoiceSubmission,
    RequestTracker,
    TrackerActions,
)
from onward.api.lifecycle.stream_registry import StreamRegistry
from onward.engine.core import EngineCore
from onward.engine.handoff.remote_prefill_index import RemotePrefill, RemotePrefillIndex
from onward.engine.outbox import ApiOutbox
from onward.engine.request import Request
from onward.engine.scheduling import request_queue, scheduling_policy, slot_and_block_allocator
from onward.engine.scheduling.block_pool import BlockPool
from onward.engine.scheduling.scheduler import Scheduler
from onward.engine.step_result_processor import StepResultProcessor
from onward.pd.decode_handoff_protocol import DecodeHandoffProtocol, DecodeHandoffState
from onward.proto import block_hash
from onward.proto.engine import Abort, Submit, TokenDelta
from onward.proto.handoff import PrefillOffer
from onward.proto.router import Attempt, StreamRecord
from onward.proto.step import StepPlan
from onward.router.client_request import RequestMetadata
from onward.router.client_stream import AttemptFailure, ClientRequest, ClientStream
from onward.router.endpoints import generation as router_generation
from onward.router.response_store import ClusterResponseStore
from onward.router.retry_policy import RetryPolicy
from onward.router.stream_routing_state import StreamRoutingState
from onward.router.stream_runner import StreamRunner
from onward.sim.process import EPOCH_S
from onward.sim.vocabulary import END_ID
from onward.text.detokenizer import Detokenizer
from onward.text.stop_strings import StopStringMatcher
from tests.sabotage.patches import Patches


def a_new_pool_keeps_its_hashes(patch: Patches) -> None:
    def renew(original: Callable, self: Scheduler, pool: BlockPool) -> list[Request]:
        old = self.pool
        charged = original(self, pool)
        for block, name in enumerate(old._block_hash):
            if name is not None and block in pool._free:
                pool._free.remove(block)
                pool._cached[block], pool._block_hash[block], pool._by_hash[name] = None, name, block
        return charged

    patch.around(Scheduler, "reset", renew)


def an_abort_without_its_epoch(patch: Patches) -> None:
    def aborts(original: Callable, self: RequestTracker, epochs: dict[str, int]) -> list[Abort]:
        return [msgspec.structs.replace(abort, epoch=None) for abort in original(self, epochs)]

    patch.around(RequestTracker, "_abort_messages", aborts)


def _change_submissions(patch: Patches, change: Callable[[Submit], Submit]) -> None:
    def attempt(original: Callable, self: RequestTracker, submission: ChoiceSubmission, now_s: float) -> list[Submit]:
        return [change(submit) for submit in original(self, submission, now_s)]

    patch.around(RequestTracker, "_resubmit", attempt)


def ends_are_filtered_in_the_history(patch: Patches) -> None:
    def change(submit: Submit) -> Submit:
        kept = [token for token in submit.generated_token_ids if token != END_ID]
        return msgspec.structs.replace(submit, generated_token_ids=kept)

    _change_submissions(patch, change)


def the_last_token_is_not_resubmitted(patch: Patches) -> None:
    def change(submit: Submit) -> Submit:
        return msgspec.structs.replace(submit, generated_token_ids=submit.generated_token_ids[:-1])

    _change_submissions(patch, change)


def a_resubmission_under_the_same_epoch(patch: Patches) -> None:
    def attempt(original: Callable, self: RequestTracker, submission: ChoiceSubmission, now_s: float) -> list[Submit]:
        if submission.epoch % EPOCHS_PER_ATTEMPT:
            submission.epoch -= 1
        return original(self, submission, now_s)

    patch.around(RequestTracker, "_resubmit", attempt)


def duplicates_are_delivered(patch: Patches) -> None:
    def take(
        original: Callable, self: RequestTracker, delta: TokenDelta, now_s: float, actions: TrackerActions
    ) -> None:
        submission = self._requests.get(delta.request_id)
        if submission is not None and submission.epoch == delta.epoch and delta.position < len(submission.tokens):
            self._accept_tokens(submission, 0, delta, actions)
        else:
            original(self, delta, now_s, actions)

    patch.around(RequestTracker, "_apply_delta", take)


def gaps_are_delivered(patch: Patches) -> None:
    def take(
        original: Callable, self: RequestTracker, delta: TokenDelta, now_s: float, actions: TrackerActions
    ) -> None:
        submission = self._requests.get(delta.request_id)
        if submission is not None and submission.epoch == delta.epoch and delta.position > len(submission.tokens):
            self._accept_tokens(submission, 0, delta, actions)
        else:
            original(self, delta, now_s, actions)

    patch.around(RequestTracker, "_apply_delta", take)


def held_requests_are_not_reported(patch: Patches) -> None:
    patch.around(EngineCore, "_send_held_requests", lambda original, self: None)


def everything_is_said_twice(patch: Patches) -> None:
    def drain(original: Callable, self: ApiOutbox, step: int) -> list:
        return [message for message in original(self, step) for _ in range(2)]

    patch.around(ApiOutbox, "take_messages", drain)


def crashes_are_not_charged(patch: Patches) -> None:
    patch.around(StepResultProcessor, "charge_crash", lambda original, self, request, now_s: False)


def a_suspect_is_let_go(patch: Patches) -> None:
    """A request that always crashes its worker is started again for ever."""
    patch.put(scheduling_policy, "MAX_CRASH_CHARGES", 1_000_000)


def hashes_outlive_their_blocks(patch: Patches) -> None:
    def forget(original: Callable, self: BlockPool, block: int) -> None:
        name = self._block_hash[block]
        original(self, block)
        assert name is not None
        self._by_hash[name] = block

    patch.around(BlockPool, "_drop_hash", forget)


def a_hash_without_the_parent(patch: Patches) -> None:
    patch.around(block_hash, "hash_block", lambda original, parent, token_ids: original(b"", token_ids))


def admitted_without_room(patch: Patches) -> None:
    patch.around(scheduling_policy, "may_admit", lambda original, needed, available, running: needed <= available + 2)


def blocks_are_not_given_back(patch: Patches) -> None:
    def vacate(
        original: Callable,
        self: slot_and_block_allocator.SlotAndBlockAllocator,
        request: Request,
        fence_step: int | None,
    ) -> None:
        request.block_ids = request.block_ids[:-1]
        original(self, request, fence_step)

    patch.around(slot_and_block_allocator.SlotAndBlockAllocator, "release", vacate)


def what_is_sent_is_not_held(patch: Patches) -> None:
    patch.around(BlockPool, "start_sending", lambda original, self, blocks: None)
    patch.around(BlockPool, "end_sending", lambda original, self, blocks, fence_step: None)


def a_late_offer_is_granted(patch: Patches) -> None:
    """An offer that comes after the end of its handoff is taken for a new one."""
    ended: dict[tuple[int, int], Any] = {}

    def forget(original: Callable, self: DecodeHandoffProtocol, number: int, *rest: object, **named: object) -> object:
        ended[id(self), number] = self._live[number]
        return original(self, number, *rest, **named)

    def receive_offer(
        original: Callable, self: DecodeHandoffProtocol, peer: str, offer: PrefillOffer, now_s: float
    ) -> None:
        over = ended.pop((id(self), offer.handoff_id), None)
        if over is not None and offer.handoff_id not in self._live:
            over.state, over.grant, over.ready, over.received_checksums = DecodeHandoffState.ASKED, None, None, None
            self._live[offer.handoff_id] = over
        original(self, peer, offer, now_s)

    def end_handoff(original: Callable, self: RemotePrefillIndex, task: RemotePrefill) -> None:
        number = task.handoff_id
        original(self, task)
        if number is not None:
            self._by_handoff_id[number] = task

    patch.around(DecodeHandoffProtocol, "_remove", forget)
    patch.around(DecodeHandoffProtocol, "_receive_offer", receive_offer)
    patch.around(RemotePrefillIndex, "end_handoff", end_handoff)


def a_lost_writer_is_forgotten(patch: Patches) -> None:
    patch.around(DecodeHandoffProtocol, "on_sender_lost", lambda original, self, handoff_id, message, now_s: None)
    patch.around(DecodeHandoffProtocol, "_fail_and_notify_peer", lambda original, self, number, error: None)


def held_back_bytes_are_dropped(patch: Patches) -> None:
    patch.around(Detokenizer, "flush", lambda original, self: "")


def held_back_text_is_dropped(patch: Patches) -> None:
    patch.around(StopStringMatcher, "flush", lambda original, self: "")


def nothing_is_held_back(patch: Patches) -> None:
    def scan(original: Callable, self: StopStringMatcher, text: str, ignore_matches: bool) -> str:
        released = original(self, text, ignore_matches)
        held, self._held, self._state = self._held, "", 0
        return released + held

    patch.around(StopStringMatcher, "_scan", scan)


def _change_attempts(patch: Patches, change: Callable[[Attempt], Attempt]) -> None:
    def attempt(original: Callable, self: ClientStream, *rest: object) -> Attempt:
        return change(original(self, *rest))

    patch.around(ClientStream, "build_attempt", attempt)


def each_attempt_has_its_own_seed(patch: Patches) -> None:
    _change_attempts(patch, lambda made: msgspec.structs.replace(made, seed=made.seed ^ (made.attempt_epoch - 1)))


def each_attempt_has_its_own_time(patch: Patches) -> None:
    _change_attempts(
        patch, lambda made: msgspec.structs.replace(made, created_s=made.created_s + made.attempt_epoch - 1)
    )


def retries_begin_without_the_last_token(patch: Patches) -> None:
    def change(made: Attempt) -> Attempt:
        cut = [msgspec.structs.replace(one, token_ids=one.token_ids[:-1]) for one in made.choices]
        return msgspec.structs.replace(made, choices=cut)

    _change_attempts(patch, change)


def every_attempt_has_the_same_epoch(patch: Patches) -> None:
    _change_attempts(patch, lambda made: msgspec.structs.replace(made, attempt_epoch=1))


def every_loss_is_final(patch: Patches) -> None:
    def judge(
        original: Callable, self: RetryPolicy, route: StreamRoutingState, failed: AttemptFailure, *rest: object
    ) -> None:
        route.set_final_error(failed.error)

    patch.around(RetryPolicy, "on_attempt_failed", judge)


def silence_is_a_reply(patch: Patches) -> None:
    """A slot that says nothing has answered its preempt: the request is queued again at once."""

    def plan(original: Callable, self: EngineCore, now_s: float) -> StepPlan | None:
        planned = original(self, now_s)
        for request in list(self.scheduler.preempting):
            self.scheduler.requeue_preempted(request)
        return planned

    patch.around(EngineCore, "plan", plan)


def a_mean_from_the_cache(patch: Patches) -> None:
    original = Request.first_scored_row

    def first_scored_row(self: Request) -> int | None:
        return None if self.spec.sampling_params.pooling is not None else original.__get__(self)

    patch.put(Request, "first_scored_row", property(first_scored_row))


def vectors_change_places(patch: Patches) -> None:
    def new_submit(original: Callable, self: EmbeddingService, wanted: PreparedEmbedding, index: int) -> Submit:
        return original(self, wanted, (index + 1) % len(wanted.prompts))

    patch.around(EmbeddingService, "_new_submit", new_submit)


def a_disconnected_request_runs_on(patch: Patches) -> None:
    patch.put(StreamRegistry, "_release", lambda self, stream: None)


def a_cancel_stays_at_the_router(patch: Patches) -> None:
    async def keep(
        original: Callable, self: ClusterResponseStore, record: StreamRecord, urls: list[str]
    ) -> list[StreamRecord]:
        return [record] if record.is_cancelled else await original(self, record, urls)

    patch.around(ClusterResponseStore, "_store_at", keep)
    patch.put(StreamRunner, "_cancel_attempt", lambda self, route: None)


# The order of the queue.


def the_last_is_first(patch: Patches) -> None:
    def queue_key(original: Callable, request: Request) -> tuple:
        return request.priority, -request.arrival_s, -request.arrival_number, request.request_id

    for module in (scheduling_policy, request_queue):
        patch.around(module, "queue_key", queue_key)


def a_router_s_wall_clock_counts(patch: Patches) -> None:
    def origin_of(
        original: Callable, path: str, body: bytes, arrival: RequestMetadata, place: Any = None
    ) -> ClientRequest:
        return replace(original(path, body, arrival, place), arrived_at_s=arrival.arrived_wall_s - EPOCH_S)

    patch.around(router_generation, "build_client_request", origin_of)
