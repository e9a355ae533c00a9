"""Attempts of a router: a client's request with the tokens so far, run as if it had never been anywhere else."""

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from onward.api.endpoints.cluster_auth import ClusterAuth
from onward.clock import SystemClock
from onward.config import ApiConfig
from onward.proto import SCHEMA_VERSION
from onward.proto.cursor import ChoiceCursor
from onward.proto.engine import ErrorInfo
from onward.proto.model import PreparedModel
from onward.proto.router import ATTEMPT_PATH, SIGNATURE_HEADER, Attempt, ChoiceSnapshot, PromptUsage
from onward.proto.sampling_params import SamplingParams
from onward.text.text_stream import TextStream
from onward.text.token_table import TokenTable
from onward.transport.cluster_signature import sign_request
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES, PATHS, PROMPT, PROMPTS, AnswerRead, ask, request
from tests.api.routed import MSGPACK_BODY, REQUEST_ID, Heard, attempt_of, error_in, given, hear, heard_in, post
from tests.api.small_model import EOS

GIVEN_UP = ErrorInfo("pd_preempted", "PD Error: out of blocks", 503, True, retry_after_s=1.5, stage="decode")
# Characters of two to four bytes, beginnings of the stop string, and every kind of end.
OUTPUTS = [list("né st😀 s stop!".encode()), [*"日本".encode(), EOS], list(b"so now it ends in st")]
FIELDS: dict[str, Any] = {"stop": "stop", "max_tokens": 20, "min_tokens": 2}
STREAMING = pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
EVERY_PATH = pytest.mark.parametrize("path", PATHS)
BYTES = TokenTable([bytes([byte]) for byte in range(256)])


def recite(prompt: Any, sampling: SamplingParams, tokens: Any) -> int:
    output = OUTPUTS[sampling.choice_index]
    return output[len(tokens)] if len(tokens) < len(output) else 33


def with_logprobs(path: str) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": 2} if "chat" in path else {"logprobs": 2}


def released(token_ids: list[int]) -> str:
    """The text that a client has when it has these tokens and no end."""
    _, text = TextStream.replay(token_ids, BYTES, ("stop",), end_token_ids=(EOS,), min_tokens=2)
    return text


def cuts(tokens: list[list[int]], reasons: list[str | None]) -> list[list[ChoiceSnapshot]]:
    """Every place at which a stream can be cut: between any tokens, before the end was told, and behind it."""
    longest = max(map(len, tokens))
    places = [given(*[(one[:at], None) for one in tokens]) for at in range(1, longest + 1)]
    for at in range(1, longest + 1):
        pairs = zip(tokens, reasons, strict=True)
        places.append(given(*[(one[:at], reason if at >= len(one) else None) for one, reason in pairs]))
    return places


def assert_seamless(whole: AnswerRead, path: str, before: list[ChoiceSnapshot], after: Heard) -> None:
    rest = after.read(len(before))
    for index, one in enumerate(before):
        expected = whole.choices[index]
        num = len(one.token_ids)
        ended = one.finish_reason is not None
        if "generate" not in path:
            shown = expected.text if ended else released(one.token_ids)
            assert shown + rest.texts[index] == expected.text
        assert rest.logprobs[index] == expected.logprobs[num:]
        assert rest.choices[index].num_ends == (0 if ended else 1)
        assert rest.reasons[index] == (None if ended else expected.finish_reason)
        assert one.token_ids + after.tokens(len(before))[index] == expected.token_ids
    assert rest.usage == whole.usage
    assert after.openings == [] and after.error is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("field", ["waited_s", "deadline_in_s"])
def test_an_attempt_at_a_time_that_is_none_is_refused_and_the_engine_goes_on(
    instance: Instance, field: str, value: float
) -> None:
    path = "/v1/completions"
    body = request(path, True, max_tokens=5, seed=7)
    before = len(instance.engine.submits)
    refused = post(instance.url, attempt_of(path, body, **{field: value}))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_message")
    assert field in refused.json()["error"]["message"] and len(instance.engine.submits) == before
    assert hear(instance.url, attempt_of(path, body)).is_done


@EVERY_PATH
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_that_is_cut_anywhere_goes_on_without_a_seam(instance: Instance, path: str, n: int) -> None:
    instance.engine.choose = recite
    body = request(path, True, n=n, **FIELDS, **with_logprobs(path))
    first = hear(instance.url, attempt_of(path, body))
    whole = first.read(n)
    tokens = first.tokens(n)
    for one, token_ids in zip(whole.choices, tokens, strict=True):
        one.token_ids = token_ids
    assert first.openings == (list(range(n)) if "chat" in path else [])
    assert whole.reasons == ["stop", "stop", "length"][:n]
    for before in cuts(tokens, whole.reasons):
        again = hear(instance.url, attempt_of(path, body, choices=before, num_cached_tokens=3))
        assert_seamless(whole, path, before, again)
        assert all(cursor.attempt_epoch > first.cursors[0].attempt_epoch for cursor in again.cursors)
        assert {(chunk["id"], chunk["created"]) for chunk in again.chunks} <= {(first.chunks[0]["id"], 1_600_000_000)}


@EVERY_PATH
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("scored", [False, True], ids=["plain", "scored"])
def test_a_whole_answer_that_is_cut_anywhere_is_whole(instance: Instance, path: str, n: int, scored: bool) -> None:
    instance.engine.choose = recite
    more = with_logprobs(path) | {"prompt_logprobs": 1} if scored else {}
    body = request(path, False, n=n, **FIELDS, **more)
    first = hear(instance.url, attempt_of(path, body))
    tokens = first.tokens(n)
    reasons = [one.finish_reason for one in first.cursors[-1].choices]
    assert first.answer is not None and first.chunks == [] and first.num_bare == len(first.cursors)
    assert first.order[0] == "facts" and first.order[-2:] == ["answer", "plain"]
    for before in cuts(tokens, reasons):
        num_before = len(instance.engine.submits)
        again = hear(instance.url, attempt_of(path, body, choices=before, num_cached_tokens=3))
        assert again.answer == first.answer
        assert all(cursor.new_tokens for cursor in again.cursors), "nothing is told twice"
        new = again.tokens(n)
        assert [one.token_ids + new[index] for index, one in enumerate(before)] == tokens, "each once"
        if not scored:
            num_open = sum(one.finish_reason is None and one.token_ids != tokens[i] for i, one in enumerate(before))
            assert len(instance.engine.submits) == num_before + num_open, "what has ended is not run"


@EVERY_PATH
def test_a_whole_answer_is_what_the_client_would_have_got(instance: Instance, path: str) -> None:
    instance.engine.choose = recite
    body = request(path, False, n=3, seed=7, prompt_logprobs=2, **FIELDS, **with_logprobs(path))
    plain = httpx.post(instance.url + path, json=body, verify=NO_CERTIFICATES).json()
    routed = msgspec.json.decode(hear(instance.url, attempt_of(path, body)).answer or b"")
    assert routed["id"].endswith(REQUEST_ID) and routed["created"] == 1_600_000_000
    assert {**routed, "id": plain["id"], "created": plain["created"]} == plain


@STREAMING
def test_facts_come_once_and_before_the_first_token(instance: Instance, streaming: bool) -> None:
    body = request("/v1/completions", streaming, n=2, max_tokens=5)
    heard = hear(instance.url, attempt_of("/v1/completions", body))
    assert heard.facts == [PromptUsage(len(PROMPT), 3, 2)]
    assert heard.order.index("facts") < heard.order.index("id")


@STREAMING
def test_what_the_first_admission_had_cached_is_told_to_the_end(instance: Instance, streaming: bool) -> None:
    body = request("/v1/generate", streaming, max_tokens=5)
    heard = hear(instance.url, attempt_of("/v1/generate", body, choices=given(([97], None)), num_cached_tokens=2))
    told = msgspec.json.decode(heard.answer)["usage"] if heard.answer else heard.chunks[-1]["usage"]
    assert told["prompt_tokens_details"] == {"cached_tokens": 2}
    assert instance.engine.submits[-1].num_cached_tokens == 2


@STREAMING
def test_if_all_has_ended_only_what_is_missing_comes(instance: Instance, streaming: bool) -> None:
    before = len(instance.engine.submits)
    body = request("/v1/completions", streaming, n=2, max_tokens=5)
    choices = given(([97] * 5, "length"), ([98, EOS], "stop"))
    heard = hear(instance.url, attempt_of("/v1/completions", body, choices=choices))
    assert heard.order == (["id", "plain"] if streaming else ["answer", "plain"])
    usage = heard.chunks[0]["usage"] if streaming else msgspec.json.decode(heard.answer or b"")["usage"]
    assert usage["completion_tokens"] == 7
    assert len(instance.engine.submits) == before


def test_the_order_has_what_the_router_fixed(instance: Instance) -> None:
    body = request("/v1/completions", True, max_tokens=3, seed=1, deadline_ms=1)
    attempt = attempt_of(
        "/v1/completions",
        body,
        seed=99,
        client_request_id="mine",
        request_id="f" * 32,
        deadline_in_s=50.0,
        waited_s=70.5,
        prefill_peers=["tcp://10.0.0.1:1"],
        prompt_token_ids=[1, 2, 3, 4],
        attempt_epoch=1_000_000,
    )
    hear(instance.url, attempt)
    submit = instance.engine.submits[-1]
    assert (submit.request_id, submit.client_request_id) == ("f" * 32 + "-0", "mine")
    assert submit.waited_s >= 70.5, "what it has waited elsewhere, and here"
    assert (submit.sampling_params.seed, submit.prompt_token_ids) == (99, [1, 2, 3, 4])
    assert submit.deadline_in_s is not None and 40 < submit.deadline_in_s <= 50
    assert (submit.is_routed, submit.prefill_peers) == (True, ["tcp://10.0.0.1:1"])
    hear(instance.url, msgspec.structs.replace(attempt, attempt_epoch=1_000_001, was_accepted=True))
    later = instance.engine.submits[-1]
    assert (submit.admit_as_new, later.admit_as_new) == (True, False), "none has let it in before; the first has"
    assert later.epoch > submit.epoch + 10_000, "above all epochs that the earlier attempt may have used"


def test_a_clients_own_tokens_are_not_told_again(instance: Instance) -> None:
    """It continues an answer by hand, and the router then resumes that stream once more."""
    instance.engine.choose = recite
    path, own = "/v1/completions", OUTPUTS[0][:5]
    body = request(path, False, generated_token_ids=own, **FIELDS, **with_logprobs(path))
    first = hear(instance.url, attempt_of(path, body))
    assert first.answer is not None
    for at in range(6, 16):
        again = hear(instance.url, attempt_of(path, body, choices=given((OUTPUTS[0][:at], None))))
        assert again.answer == first.answer
    streamed = body | {"stream": True}
    heard = hear(instance.url, attempt_of(path, streamed, choices=given((OUTPUTS[0][:6], None))))
    assert released(OUTPUTS[0][:6]) + heard.read(1).texts[0] == released(OUTPUTS[0])


def test_scores_that_a_client_has_asked_for_come_once(instance: Instance) -> None:
    instance.engine.choose = recite
    path = "/v1/generate"
    for streaming in (True, False):
        body = request(path, streaming, generated_token_ids=OUTPUTS[0][:4], rescore_from=1, **FIELDS, logprobs=0)
        first = hear(instance.url, attempt_of(path, body))
        again = hear(instance.url, attempt_of(path, body, choices=given((OUTPUTS[0][:6], None))))
        if streaming:
            assert first.read(1).logprobs[0][5:] == again.read(1).logprobs[0], "those before were told"
        else:
            assert first.answer == again.answer


def test_scores_that_a_given_up_attempt_owes_are_asked_for_by_its_resume(instance: Instance) -> None:
    """A client that waits for a whole answer has not received the logprobs of a router's tokens."""
    instance.engine.choose = recite
    path = "/v1/generate"
    body = request(path, False, **FIELDS, logprobs=0)
    whole = ask(instance.url, path, body)
    instance.engine.give_up = lambda sampling, position: GIVEN_UP if position == 5 else None
    before = given((OUTPUTS[0][:5], None))
    left = hear(instance.url, attempt_of(path, body, choices=before, is_final=True)).answer
    assert left is not None
    instance.engine.give_up = lambda sampling, position: None
    rest = ask(instance.url, path, body | json.loads(left)["resume"])
    assert rest.logprobs == whole.logprobs


@STREAMING
def test_f43_what_depends_on_the_tokens_so_far_goes_on_and_does_not_start_over(
    instance: Instance, streaming: bool
) -> None:
    instance.engine.choose = recite
    path = "/v1/completions"
    fields = {"stop": "stop", "max_tokens": 20, "min_tokens": 9, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    body = request(path, streaming, **fields, repetition_penalty=1.5, bad_words=["zz"], logit_bias={"5": 1.0})
    first = hear(instance.url, attempt_of(path, body))
    whole = instance.engine.submits[-1]
    for at in range(1, 17):
        before = given((OUTPUTS[0][:at], None))
        heard = hear(instance.url, attempt_of(path, body, choices=before))
        submit = instance.engine.submits[-1]
        assert submit.sampling_params == whole.sampling_params, "limits and penalties are those of the whole output"
        assert submit.generated_token_ids == OUTPUTS[0][:at], "and are applied to all of it"
        assert len(before[0].token_ids) + len(heard.tokens(1)[0]) == 17, "the stop string counts across the cut"
        assert heard.cursors[-1].choices[0] == ChoiceCursor(17, "stop")
        if not streaming:
            assert heard.answer == first.answer


@pytest.mark.parametrize("at", range(1, 12))
def test_f44_ids_are_carried_and_text_is_never_encoded_again(instance: Instance, at: int) -> None:
    """Every cut, also inside of a character: its halves are ids that no text has."""
    output = [*"é😀日".encode(), *b"ab!"]
    instance.engine.choose = lambda prompt, sampling, tokens: output[len(tokens)]
    path = "/v1/chat/completions"
    body = request(path, True, max_tokens=len(output))
    heard = hear(instance.url, attempt_of(path, body, choices=given((output[:at], None))))
    assert instance.engine.submits[-1].generated_token_ids == output[:at]
    assert released(output[:at]) + heard.read(1).texts[0] == "é😀日ab!"
    assert heard.tokens(1) == [output[at:]]
    assert "�" not in heard.read(1).texts[0]


@EVERY_PATH
@STREAMING
def test_a_give_up_is_an_error_that_a_router_acts_on(instance: Instance, path: str, streaming: bool) -> None:
    instance.engine.choose = recite
    instance.engine.give_up = lambda sampling, position: (
        GIVEN_UP if sampling.choice_index == 0 and position == 3 else None
    )
    body = request(path, streaming, n=2, **FIELDS)
    heard = hear(instance.url, attempt_of(path, body))
    assert heard.error is not None and heard.answer is None
    told = {name: heard.error[name] for name in ("code", "retryable", "stage", "retry_after_s")}
    assert told == {"code": "pd_preempted", "retryable": True, "stage": "decode", "retry_after_s": 1.5}
    assert heard.tokens(2)[0] == OUTPUTS[0][:3], "after the tokens so far"
    assert all(one.finish_reason != "pd_reschedule" for one in heard.cursors[-1].choices)
    instance.wait_until(lambda: not instance.engine.running)


@STREAMING
def test_a_give_up_of_the_last_attempt_is_told_in_the_clients_form(instance: Instance, streaming: bool) -> None:
    instance.engine.choose = recite
    instance.engine.give_up = lambda sampling, position: GIVEN_UP if position == 7 else None
    body = request("/v1/completions", streaming, **FIELDS, **with_logprobs("/v1/completions"))
    before = given((OUTPUTS[0][:4], None))
    heard = hear(instance.url, attempt_of("/v1/completions", body, choices=before, is_final=True))
    last = heard.chunks[-2] if streaming else msgspec.json.decode(heard.answer or b"")
    [choice] = last["choices"]
    assert (choice["finish_reason"], choice["completion_token_ids"]) == ("pd_reschedule", OUTPUTS[0][:7])
    assert last["resume"]["generated_token_ids"] == OUTPUTS[0][:7]
    assert heard.error is None


def test_an_error_before_the_stream_is_one_of_http(instance: Instance) -> None:
    body = request("/v1/completions", True)
    assert post(instance.url, attempt_of("/v1/completions", body | {"n": 0})).json()["error"]["param"] == "n"
    instance.engine.refusal = ErrorInfo("overloaded", "the queue is full", 429, True, retry_after_s=1.5)
    refused = post(instance.url, attempt_of("/v1/completions", body))
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
    instance.engine.refusal = GIVEN_UP
    taken = attempt_of("/v1/completions", body, was_accepted=True)  # a full queue that is remembered is not its concern
    assert post(instance.url, taken).json()["error"]["code"] == "pd_preempted"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"path": "/v1/models"}, "path"),
    ({"attempt_epoch": 0}, "attempt_epoch"),
    ({"attempt_epoch": 1 << 50}, "attempt_epoch"),
    ({"choices": given(([1], None), ([2], None))}, "choices"),
    ({"choices": given(([999], None))}, "choices[0].token_ids[0]"),
    ({"reader_positions": [ChoiceCursor(1), ChoiceCursor(1)]}, "reader_positions"),
    ({"prompt_token_ids": []}, "prompt_token_ids"),
    ({"prompt_token_ids": [320]}, "prompt_token_ids[0]"),
    ({"schema_version": SCHEMA_VERSION + 1}, "schema_version"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_an_attempt_that_makes_no_sense_is_refused(instance: Instance, fields: dict[str, Any], param: str) -> None:
    attempt = attempt_of("/v1/completions", request("/v1/completions", True))
    refused = post(instance.url, msgspec.structs.replace(attempt, **fields))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_message_that_is_no_attempt_is_refused(instance: Instance) -> None:
    for message in (b"", b"\xc1", msgspec.msgpack.encode({"path": "/v1/completions"})):
        refused = httpx.post(
            instance.url + ATTEMPT_PATH,
            content=message,
            headers=MSGPACK_BODY,
            verify=NO_CERTIFICATES,
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_message")


def long_attempt(**fields: Any) -> Attempt:
    return attempt_of("/v1/completions", request("/v1/completions", True, max_tokens=200), **fields)


def test_a_later_attempt_takes_the_place_of_an_earlier_one(instance: Instance) -> None:
    instance.engine.paused = True
    with ThreadPoolExecutor(2) as threads:
        epoch = long_attempt().attempt_epoch
        first = threads.submit(post, instance.url, long_attempt(attempt_epoch=epoch + 1))
        instance.wait_until(lambda: len(instance.engine.running) == 1)
        second = threads.submit(post, instance.url, long_attempt(attempt_epoch=epoch + 2, choices=given(([97], None))))
        error = error_in(first.result(20))
        assert (error["code"], error["retryable"]) == ("stale_attempt", False)
        stale = post(instance.url, long_attempt(attempt_epoch=epoch + 2))
        assert (stale.status_code, stale.json()["error"]["code"]) == (409, "stale_attempt")
        assert len(instance.engine.running) == 1
        for _ in range(3):
            long_attempt()
        instance.engine.paused = False
        assert len(heard_in(second.result(20).text).tokens(1)[0]) == 199


def test_an_attempt_has_no_trouble_with_its_label(instance: Instance) -> None:
    instance.engine.paused = True
    with ThreadPoolExecutor(2) as threads:
        asked = [
            threads.submit(post, instance.url, long_attempt(client_request_id="x", request_id=c * 32)) for c in "ab"
        ]
        instance.wait_until(lambda: len(instance.engine.running) == 2)
        aborted = httpx.post(f"{instance.url}/v1/abort", json={"ids": ["x"]}, verify=NO_CERTIFICATES).json()
        assert aborted["aborted"] == ["x"]
        ends = [heard_in(one.result(20).text).read(1).reasons for one in asked]
    assert ends == [["abort"]] * 2


def test_a_silent_stream_says_each_second_how_far_it_is(instance: Instance) -> None:
    instance.engine.paused = True
    message = msgspec.msgpack.encode(attempt_of("/v1/generate", request("/v1/generate", True, n=2, max_tokens=3)))
    url = instance.url + ATTEMPT_PATH
    with httpx.stream(
        "POST", url, content=message, headers=MSGPACK_BODY, timeout=30, verify=NO_CERTIFICATES
    ) as response:
        lines = (line for line in response.iter_lines() if line)
        engine, step = instance.engine.incarnation, instance.engine.num_steps
        assert next(lines) == f": progress {engine} {step} 27 3", "tokens of both choices, the nearer place"
        instance.kill_engine()
        seen = {next(lines) for _ in range(2)}
        assert ": progress - 0 0 0" in seen
        instance.start_engine()
        assert '"finish_reason":"length"' in "".join(lines)


def test_an_attempt_begins_to_speak_although_there_is_no_engine(instance: Instance) -> None:
    instance.kill_engine()
    message = msgspec.msgpack.encode(attempt_of("/v1/generate", request("/v1/generate", False, max_tokens=3)))
    url = instance.url + ATTEMPT_PATH
    try:
        with httpx.stream(
            "POST", url, content=message, headers=MSGPACK_BODY, timeout=30, verify=NO_CERTIFICATES
        ) as response:
            lines = response.iter_lines()
            assert next(lines) == ": progress - 0 0 0"
            instance.start_engine()
            assert any(line.startswith("event: answer") for line in lines)
    finally:
        if instance.engine_thread is None:
            instance.start_engine()


def skipping(tokens: list[list[int]], at: int, reasons: list[str | None]) -> list[ChoiceCursor]:
    return [
        ChoiceCursor(min(at, len(one)), reason if at >= len(one) else None)
        for one, reason in zip(tokens, reasons, strict=True)
    ]


@pytest.fixture
def exact(model: PreparedModel) -> Iterator[Instance]:
    """One whose tokens come out the same however often they are made."""
    with running(msgspec.structs.replace(model, quantization="int8"), ApiConfig()) as instance:
        yield instance


@EVERY_PATH
def test_tokens_that_nobody_has_are_made_again_and_told_to_the_router_alone(exact: Instance, path: str) -> None:
    instance = exact
    instance.engine.choose = recite
    body = request(path, True, n=3, prompt_logprobs=1, **FIELDS, **with_logprobs(path))
    first = hear(instance.url, attempt_of(path, body))
    whole, tokens = first.read(3), first.tokens(3)
    for at in range(1, 21):
        skip_to = skipping(tokens, at, whole.reasons)
        heard = hear(instance.url, attempt_of(path, body, reader_positions=skip_to))
        assert heard.tokens(3) == tokens, "the router learns all of them"
        assert heard.openings == [] and not any("prompt_logprobs" in str(chunk) for chunk in heard.chunks)
        rest = heard.read(3)
        for index, place in enumerate(skip_to):
            ended = place.finish_reason is not None
            assert rest.logprobs[index] == whole.logprobs[index][place.position :]
            assert rest.choices[index].num_ends == (not ended)
            if "generate" not in path:
                shown = whole.texts[index] if ended else released(tokens[index][: place.position])
                assert shown + rest.texts[index] == whole.texts[index]
        assert rest.usage == whole.usage


@pytest.mark.parametrize("skip_to", [ChoiceCursor(7), ChoiceCursor(5), ChoiceCursor(3, "stop")])
def test_what_is_made_again_differently_is_an_error(exact: Instance, skip_to: ChoiceCursor) -> None:
    body = request("/v1/completions", True, max_tokens=5)
    heard = hear(exact.url, attempt_of("/v1/completions", body, reader_positions=[skip_to]))
    if skip_to.position == 5:  # the end that was not told yet
        assert heard.error is None and heard.chunks[0]["choices"][0]["finish_reason"] == "length"
    else:
        assert heard.error is not None and heard.error["code"] == "stream_unknown"
        assert heard.chunks == []


def test_where_tokens_may_come_out_otherwise_nothing_is_made_again(instance: Instance) -> None:
    body = request("/v1/completions", True, max_tokens=5)
    response = post(instance.url, attempt_of("/v1/completions", body, reader_positions=[ChoiceCursor(2)]))
    assert (response.status_code, response.json()["error"]["code"]) == (404, "stream_unknown")


def test_with_a_cluster_key_the_proof_counts(model: PreparedModel) -> None:
    key = "ab" * 32
    with running(model, ApiConfig(cluster_key=key)) as instance:
        attempt = attempt_of("/v1/completions", request("/v1/completions", True, max_tokens=3))
        message, now_s = msgspec.msgpack.encode(attempt), SystemClock().wall_s()
        wrong = [
            {},
            {SIGNATURE_HEADER: "1:ab"},
            {SIGNATURE_HEADER: sign_request("cd" * 32, "POST", ATTEMPT_PATH, message, now_s)},
            {SIGNATURE_HEADER: sign_request(key, "POST", ATTEMPT_PATH, message, now_s - 100)},
            {SIGNATURE_HEADER: sign_request(key, "POST", "/internal/find", message, now_s)},
            {SIGNATURE_HEADER: sign_request(key, "POST", ATTEMPT_PATH, message + b"x", now_s)},
        ]
        for headers in wrong:
            refused = post(instance.url, attempt, **headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        right = {SIGNATURE_HEADER: sign_request(key, "POST", ATTEMPT_PATH, message, now_s)}
        assert heard_in(post(instance.url, attempt, **right).text).is_done


@pytest.mark.parametrize(
    ("host", "allowed"),
    [("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.1", False), ("testclient", False)],
)
def test_without_a_key_only_this_host_may_ask(host: str, allowed: bool) -> None:
    check: Callable[[], None] = lambda: ClusterAuth("", SystemClock()).check(  # noqa: E731
        {"type": "http", "headers": [], "path": "/", "client": (host, 1)}, b""
    )
    if allowed:
        check()
    else:
        with pytest.raises(Exception, match="only this host"):
            check()


def test_prompts_are_as_the_client_sent_them(instance: Instance) -> None:
    """The clock of the template is the router's."""
    for path in PATHS:
        hear(instance.url, attempt_of(path, {"model": "small-model", "max_tokens": 1} | PROMPTS[path]))
        assert instance.engine.submits[-1].prompt_token_ids
