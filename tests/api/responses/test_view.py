"""A response told from its record: however the tokens came, and as often as one looks, it is the same story."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from onward.api.engine_link.engine_client import EngineClient, LoadShedder
from onward.api.engine_link.request_tracker import RequestTracker
from onward.api.lifecycle.request_builder import ApiServices, RequestBuilder
from onward.api.lifecycle.request_metrics import RequestLatencyMetrics
from onward.api.requests.preprocessing_executors import make_executors
from onward.api.requests.text_processor import TextProcessor
from onward.api.requests.unsupported_fields import UnknownFieldReporter
from onward.api.responses.response_view import ResponseView
from onward.api.responses.responses_adapter import ResponsesAdapter
from onward.clock import SystemClock
from onward.config import ApiConfig
from onward.obs.metrics import Registry
from onward.proto.engine import ErrorInfo
from onward.proto.finish_reasons import PD_RESCHEDULE
from onward.proto.model import PreparedModel
from onward.proto.router import ChoiceSnapshot, StreamRecord
from onward.proto.step import TokenLogprobs
from onward.random_source import SystemRandomSource
from onward.text.prompt_tokenizer import read_tokenizer_files
from onward.web.openai_api.response_ids import PATH
from tests.api.responses.reading import KINDS, body_of
from tests.api.routed import attempt_of
from tests.api.small_model import EOS


@pytest.fixture(scope="module")
def jobs(thinker: PreparedModel) -> Iterator[RequestBuilder]:
    registry, clock, prompts = Registry(), SystemClock(), TextProcessor(read_tokenizer_files(thinker))

    def nobody(*_: object) -> None:
        raise AssertionError("a record is told without an engine")

    async def backend_of(threads: ThreadPoolExecutor) -> ApiServices:
        client = EngineClient(RequestTracker(registry), clock, connect=nobody, on_fault=nobody)  # type: ignore[arg-type]
        unknown = UnknownFieldReporter(registry.counter("onward_unknown_fields_total", ""))
        fullness = LoadShedder(clock, registry)
        queues = make_executors(lambda *_: threads, clock)
        backend = ApiServices(
            ApiConfig(),
            thinker,
            prompts,
            client,
            clock,
            queues,
            unknown,
            SystemRandomSource(),
            fullness,
            RequestLatencyMetrics(registry),
        )
        await client.close()
        return backend

    with ThreadPoolExecutor(1) as threads:
        yield RequestBuilder(ResponsesAdapter(prompts), PATH, asyncio.run(backend_of(threads)))


def record_of(kind: str, num_tokens: int | None = None) -> StreamRecord:
    """The first tokens of an answer of this kind; by default all, and the end."""
    tokens = [*KINDS[kind][1], EOS][: body_of(kind)["max_output_tokens"]]
    reason = ("stop" if tokens[-1:] == [EOS] else "length") if num_tokens is None else None
    given = tokens if num_tokens is None else tokens[:num_tokens]
    scores = [TokenLogprobs(-float(at), 1, [(token, -float(at))]) for at, token in enumerate(given)]
    attempt = attempt_of(
        PATH, body_of(kind), choices=[ChoiceSnapshot(given, reason)], attempt_epoch=1, num_cached_tokens=3
    )
    return StreamRecord(
        attempt=attempt, is_live=num_tokens is not None, logprobs=scores if "include" in body_of(kind) else []
    )


@pytest.mark.parametrize("kind", KINDS)
def test_however_many_tokens_come_together_the_events_are_the_same(jobs: RequestBuilder, kind: str) -> None:
    whole = ResponseView(jobs, record_of(kind))
    assert whole.is_over
    num_tokens = len(record_of(kind).attempt.choices[0].token_ids)
    for step in (1, 2, 3, 7):
        view = ResponseView(jobs, record_of(kind, 0))
        for at in range(0, num_tokens, step):
            view.apply(record_of(kind, at))
            assert not view.is_over or "tool" in kind or "call" in kind or "stop" in kind
        view.apply(record_of(kind))
        assert view.events == whole.events


def test_one_that_has_failed_or_was_cancelled_ends_with_what_there_is(jobs: RequestBuilder) -> None:
    lost = ErrorInfo("crashed_worker", "the worker is down", 500, False)
    for more, name, status in (
        ({"error": lost}, "response.failed", "failed"),
        ({"is_cancelled": True}, "response.incomplete", "cancelled"),
    ):
        record = msgspec.structs.replace(record_of("words", 3), is_live=False, **more)
        view = ResponseView(jobs, record)
        told = view.response(record)
        assert (view.is_over, view.events[-1].name, told["status"]) == (True, name, status)
        assert told["output"][0]["status"] == "incomplete" and told["output"][0]["content"][0]["text"] == "né"
        assert told["usage"]["output_tokens"] == 3


def test_scores_that_are_behind_are_waited_for_as_long_as_somebody_may_make_them(jobs: RequestBuilder) -> None:
    whole = ResponseView(jobs, record_of("words, scored"))
    for is_live in (True, False):
        late = msgspec.structs.replace(record_of("words, scored", 4), logprobs=[], is_live=is_live)
        view = ResponseView(jobs, late)
        assert len(view.events) == 2, "what has no scores yet is not told"
        view.apply(record_of("words, scored", 4))
        view.apply(record_of("words, scored"))
        assert view.events == whole.events


def test_scores_that_were_lost_leave_the_words(jobs: RequestBuilder) -> None:
    record = msgspec.structs.replace(record_of("words, scored"), logprobs=[])
    view = ResponseView(jobs, record)
    assert view.is_over
    part = view.response(record)["output"][0]["content"][0]
    assert (part["text"], part["logprobs"]) == ("né\n\nwö", [])


def test_one_that_was_given_up_has_failed_although_its_record_does_not_say_why(jobs: RequestBuilder) -> None:
    record = record_of("words", 3)
    attempt = msgspec.structs.replace(
        record.attempt, choices=[ChoiceSnapshot(record.attempt.choices[0].token_ids, PD_RESCHEDULE)]
    )
    record = StreamRecord(attempt=attempt, is_live=False)
    view = ResponseView(jobs, record)
    told = view.response(record)
    assert (view.is_over, view.events[-1].name, told["status"]) == (True, "response.failed", "failed")
    assert told["error"]["code"] == "server_error" and told["output"][0]["content"][0]["text"] == "né"
