"""One request's fault is that request's fault: whichever stage raises for it, the others of that step lose nothing."""

import inspect
from collections.abc import Callable

import pytest

from onward.engine.outbox import ApiOutbox
from onward.engine.request import Request
from onward.engine.scheduling.scheduler import Scheduler
from onward.engine.step_result_processor import StepResultProcessor
from tests.conformance.conftest import Connect

NOT_STAGES = {
    "_fail_isolated",
    "_process_isolated",
    "commit_peer_tokens",
    "charge_crash",
    "reschedule",
    "_on_embedding",
}
"""What isolates, what begins elsewhere than with a worker's event, and what no request for tokens meets."""


def _stages() -> list[tuple[type, str]]:
    """Every function that the token stage runs for one request, found by what it takes."""
    own = [
        (StepResultProcessor, name)
        for name, function in inspect.getmembers(StepResultProcessor, inspect.isfunction)
        if "request" in inspect.signature(function).parameters and name not in NOT_STAGES
    ]
    return [*own, (Scheduler, "publish_computed"), (Scheduler, "requeue_preempted"), (ApiOutbox, "add_delta")]


class Breaks:
    """Makes a function raise for the request `bad`, once it has so many tokens: before its work or after it."""

    def __init__(self, function: Callable, *, from_token: int, after: bool) -> None:
        self._function, self._from_token, self._after = function, from_token, after
        self._parameters = list(inspect.signature(function).parameters)
        self.fired = 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        request = dict(zip(self._parameters, args, strict=False)).get("request", kwargs.get("request"))
        if not isinstance(request, Request) or not self._due(request):
            return self._function(*args, **kwargs)
        if self._after:
            self._function(*args, **kwargs)
        self.fired += 1
        raise ValueError("broken for this request")

    def _due(self, request: Request) -> bool:
        return request.request_id == "bad" and not self.fired and request.num_generated >= self._from_token


@pytest.mark.parametrize("from_token", [0, 3], ids=["early", "in mid-stream"])
@pytest.mark.parametrize("after", [False, True], ids=["before its work", "after its work"])
@pytest.mark.parametrize(("where", "name"), _stages(), ids=lambda value: getattr(value, "__name__", value))
def test_a_stage_that_raises_for_one_request_costs_no_other_a_token(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, where: type, name: str, after: bool, from_token: int
) -> None:
    breaks = Breaks(getattr(where, name), from_token=from_token, after=after)
    monkeypatch.setattr(where, name, lambda *args, **kwargs: breaks(*args, **kwargs))
    harness = connect(num_blocks=14, block_size=4, max_num_seqs=4, max_num_batched_tokens=8)
    bad = harness.submit("bad", list(range(1, 12)), max_tokens=20, priority=5, logprobs=1)
    good = [harness.submit("good", [20] * 7, max_tokens=16, logprobs=1)]
    for _ in range(200):
        if len(good) == 1 and (len(bad.tokens) >= 4 or bad.finish_reason):
            # Too much for the pool: now it is preempted.
            good += [harness.submit(f"good{i}", [i + 21] * 7, max_tokens=16, logprobs=1) for i in range(2)]
        # So that the stage of a failure is met too, late in its life.
        if len(bad.tokens) >= 12 and bad.finish_reason is None:
            harness.doomed.add("bad")
        while harness.plan() is not None:
            pass
        if not harness.plans:
            break
        harness.answer()
    assert harness.core.idle
    assert breaks.fired == 1, "a fault that never happened shows nothing"
    for client in good:
        assert (client.tokens, client.finish_reason) == (harness.expected(client), "length")
    assert bad.num_finishes == 1
    assert bad.finish_reason == "error"
    assert bad.tokens == harness.expected(bad)[: len(bad.tokens)]
    harness.core.audit_idle()
    harness.check()


@pytest.mark.parametrize("after", [False, True], ids=["before its work", "after its work"])
def test_a_vector_that_cannot_be_passed_on_costs_no_other_request_a_token(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    breaks = Breaks(StepResultProcessor._on_embedding, from_token=0, after=after)
    monkeypatch.setattr(StepResultProcessor, "_on_embedding", lambda *args: breaks(*args))
    harness = connect(num_blocks=14, block_size=4, max_num_seqs=4, max_num_batched_tokens=8)
    bad = harness.submit("bad", list(range(1, 12)), max_tokens=None, pooling="last")
    good = harness.submit("good", [20] * 7, max_tokens=16)
    for _ in range(200):
        while harness.plan() is not None:
            pass
        if not harness.plans:
            break
        harness.answer()
    assert harness.core.idle
    assert breaks.fired == 1
    assert (good.tokens, good.finish_reason) == (harness.expected(good), "length")
    assert bad.num_finishes == 1
    harness.core.audit_idle()
