"""Streams whose client has gone: what is kept of them, for how long, and how they are gone on with."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from onward.config import ApiConfig
from onward.proto.cursor import ChoiceCursor, Cursor, format_cursor, parse_cursor
from onward.proto.engine import ErrorInfo
from onward.proto.model import PreparedModel
from onward.proto.router import ATTEMPT_PATH
from onward.proto.sampling_params import SamplingParams
from onward.text.text_stream import TextStream
from onward.text.token_table import TokenTable
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES, PATHS, AnswerRead, ask, read, request
from tests.api.routed import MSGPACK_BODY, REQUEST_ID, attempt_of, find, hear
from tests.api.small_model import EOS
from tests.api.stand_in_engine import hashed_token

# An end by a stop string with a held-back beginning of one in the middle, and one by a token behind a long character.
OUTPUTS = [list("né st😀 stop!".encode()), [*"日本語".encode(), *b" st", EOS]]
FIELDS: dict[str, Any] = {"stop": "stop", "max_tokens": 20, "seed": 7}
EVERY_PATH = pytest.mark.parametrize("path", PATHS)
BYTES = TokenTable([bytes([byte]) for byte in range(256)])


def recite(prompt: Any, sampling: SamplingParams, tokens: Any) -> int:
    output = OUTPUTS[sampling.choice_index]
    return output[len(tokens)] if len(tokens) < len(output) else 33


def released(token_ids: list[int]) -> str:
    _, text = TextStream.replay(token_ids, BYTES, ("stop",), end_token_ids=(EOS,))
    return text


def with_logprobs(path: str) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": 2} if "chat" in path else {"logprobs": 2}


def places(whole: AnswerRead, *, every_pair: bool) -> Iterator[list[ChoiceCursor]]:
    """Wherever the last event may have left the choices."""
    each = [
        [*map(ChoiceCursor, range(len(one.token_ids))), ChoiceCursor(len(one.token_ids), one.finish_reason)]
        for one in whole.choices
    ]
    if len(each) == 1 or not every_pair:
        for at in range(1, max(map(len, each))):
            yield [one[min(at, len(one) - 1)] for one in each]
    else:
        yield from ([first, second] for first in each[0][::2] for second in each[1][::3])


def go_on(url: str, path: str, cursor: Cursor, body: dict[str, Any] | None = None) -> httpx.Response:
    headers = {"last-event-id": format_cursor(cursor)}
    if body is None:
        return httpx.get(url + path, headers=headers, timeout=30, verify=NO_CERTIFICATES)
    return httpx.post(url + path, json=body, headers=headers, timeout=30, verify=NO_CERTIFICATES)


def assert_gone_on(whole: AnswerRead, path: str, choices: list[ChoiceCursor], rest: AnswerRead) -> None:
    for expected, place, one in zip(whole.choices, choices, rest.choices, strict=True):
        ended = place.finish_reason is not None
        assert expected.token_ids[: place.position] + one.token_ids == expected.token_ids
        if "generate" not in path:
            shown = expected.text if ended else released(expected.token_ids[: place.position])
            assert shown + one.text == expected.text
        assert one.logprobs == expected.logprobs[place.position :]
        assert (one.num_ends, one.finish_reason) == ((0, None) if ended else (1, expected.finish_reason))
    assert rest.usage == whole.usage


@EVERY_PATH
@pytest.mark.parametrize("n", [1, 2])
def test_a_client_goes_on_from_any_place_and_gets_each_token_once(instance: Instance, path: str, n: int) -> None:
    instance.engine.choose = recite
    body = request(path, True, n=n, **FIELDS, **with_logprobs(path))
    whole = ask(instance.url, path, body)
    last = whole.cursor
    assert last is not None and whole.reasons == ["stop"] * n
    for choices in places(whole, every_pair="completions" in path and "chat" not in path):
        response = go_on(
            instance.url, path, msgspec.structs.replace(last, choices=choices, new_tokens={}, usage_sent=False)
        )
        assert response.status_code == 200, response.text
        assert '"role"' not in response.text, "the openings were told"
        assert_gone_on(whole, path, choices, read(response, body))


@EVERY_PATH
def test_a_client_that_has_the_usage_gets_only_the_end(instance: Instance, path: str) -> None:
    body = request(path, True, **FIELDS)
    whole = ask(instance.url, path, body)
    assert whole.usage is not None and whole.cursor is not None and whole.cursor.usage_sent
    for again in (None, body):
        assert go_on(instance.url, path, whole.cursor, again).text == "data: [DONE]\n\n"


def test_a_lost_connection_stops_the_work_and_leaves_what_was_made(instance: Instance) -> None:
    path = "/v1/completions"
    body = request(path, True, n=2, max_tokens=60, seed=7)
    whole = ask(instance.url, path, body)
    instance.engine.choose = pausing(instance, at=9)
    cursors, texts = lose(instance, path, body)
    instance.wait_until(lambda: not instance.engine.running)
    record = find(instance.url, cursors[-1].request_id)
    assert record is not None and record.attempt.num_cached_tokens == 3
    for made, told, expected in zip(record.attempt.choices, cursors[-1].choices, whole.choices, strict=True):
        assert made.token_ids == expected.token_ids[: len(made.token_ids)]
        assert len(made.token_ids) >= told.position >= 8
    instance.engine.choose, instance.engine.paused = hashed_token, False
    for cursor in cursors[-3:]:
        response = go_on(instance.url, path, cursor)
        told = {name: text[: cursor.choices[name].position] for name, text in enumerate(texts)}
        rest = read(response, body)
        assert [told[name] + text for name, text in enumerate(rest.texts)] == whole.texts
        assert rest.cursor is not None and rest.cursor.attempt_epoch > cursor.attempt_epoch
        assert response.headers["content-type"].startswith("text/event-stream")


def test_a_resumed_stream_is_admitted_like_a_new_one_and_a_refusal_loses_nothing(instance: Instance) -> None:
    path = "/v1/completions"
    body = request(path, True, n=1, max_tokens=60, seed=7)
    whole = ask(instance.url, path, body)
    instance.engine.choose = pausing(instance, at=9)
    cursors, [told] = lose(instance, path, body)
    instance.wait_until(lambda: not instance.engine.running)
    instance.engine.choose, instance.engine.paused = hashed_token, False
    instance.engine.refusal = ErrorInfo("rate_limited", "max_in_flight", 429, True, retry_after_s=7.0)
    for again in (None, body):
        refused = go_on(instance.url, path, cursors[-1], again)
        assert refused.status_code == 429, refused.text
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
    instance.engine.refusal = None
    [rest] = read(go_on(instance.url, path, cursors[-1]), body).texts
    assert told[: cursors[-1].choices[0].position] + rest == whole.texts[0]
    assert all(one.admit_as_new for one in instance.engine.submits[-3:])


def pausing(instance: Instance, at: int) -> Callable[..., int]:
    def choose(prompt: Any, sampling: SamplingParams, tokens: Any) -> int:
        if len(tokens) >= at:
            instance.engine.paused = True
        return hashed_token(prompt, sampling, tokens)

    return choose


def lose(instance: Instance, path: str, body: dict[str, Any]) -> tuple[list[Cursor], list[str]]:
    """Reads all there is until the engine pauses, and goes away."""
    cursors: list[Cursor] = []
    texts = [""] * body["n"]
    with httpx.stream("POST", instance.url + path, json=body, timeout=30, verify=NO_CERTIFICATES) as response:
        for line in response.iter_lines():
            if line.startswith("id: "):
                cursors.append(parse_cursor(line.removeprefix("id: ")))
            elif line.startswith("data: "):
                [choice] = msgspec.json.decode(line.removeprefix("data: "))["choices"]
                texts[choice["index"]] += choice["text"]
                if is_all(instance, cursors[-1]):
                    break
    return cursors, texts


def is_all(instance: Instance, cursor: Cursor) -> bool:
    """Whether the engine has paused, and these are all tokens that it has made."""
    made = [len(one.tokens) for _, one in sorted(instance.engine.running.items())]
    return instance.engine.paused and [one.position for one in cursor.choices] == made


def test_a_client_may_be_back_before_it_was_missed(instance: Instance) -> None:
    path = "/v1/completions"
    body = request(path, True, max_tokens=60, seed=7)
    whole = ask(instance.url, path, body)
    instance.engine.choose = pausing(instance, at=9)
    with httpx.stream("POST", instance.url + path, json=body, timeout=30, verify=NO_CERTIFICATES) as response:
        lines = response.iter_lines()
        cursor = parse_cursor(next(line for line in lines if line.startswith("id: ")).removeprefix("id: "))
        instance.wait_until(lambda: instance.engine.paused)
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(go_on, instance.url, path, cursor)
            assert '"code":"stale_attempt"' in "".join(lines), "the old connection is told"
            instance.engine.choose, instance.engine.paused = hashed_token, False
            rest = read(asking.result(20), body)
    told = "".join(map(chr, whole.choices[0].token_ids[: cursor.choices[0].position]))
    assert told + rest.texts[0] == whole.texts[0]


def test_an_abort_drops_the_record(instance: Instance) -> None:
    path = "/v1/completions"
    whole = ask(instance.url, path, request(path, True, max_tokens=5))
    assert whole.cursor is not None
    name = whole.cursor.request_id
    aborted = httpx.post(f"{instance.url}/v1/abort", json={"ids": [f"cmpl-{name}"]}, verify=NO_CERTIFICATES).json()
    assert aborted["aborted"] == [f"cmpl-{name}"]
    assert find(instance.url, name) is None
    response = go_on(instance.url, path, whole.cursor)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "stream_unknown")


def test_a_stream_that_nobody_holds_is_unknown(instance: Instance) -> None:
    path, other = "/v1/completions", "/v1/generate"
    body = request(path, True, max_tokens=5, seed=7)
    last = ask(instance.url, path, body).cursor
    assert last is not None
    unknown = Cursor("x" * 32, 7, 1, [ChoiceCursor(2)])
    wrong = [
        go_on(instance.url, path, unknown),
        go_on(instance.url, path, unknown, body),  # this model is not exact, so it cannot be made again
        go_on(instance.url, other, last),
        go_on(instance.url, path, Cursor(last.request_id, 8, 1, [ChoiceCursor(2)])),
        go_on(instance.url, path, Cursor(last.request_id, 7, 1, [ChoiceCursor(9)])),
        go_on(instance.url, path, Cursor(last.request_id, 7, 1, [ChoiceCursor(2)] * 2)),
    ]
    answers = [(one.status_code, one.json()["error"]["code"]) for one in wrong]
    assert answers == [(404, "stream_unknown")] * 6
    bad = httpx.get(instance.url + path, headers={"last-event-id": "what?"}, verify=NO_CERTIFICATES)
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "Last-Event-ID")


@EVERY_PATH
@pytest.mark.parametrize("named", [{"model": "small-model"}, {"model": None}, {"model": ""}, {}])
def test_a_repeated_post_goes_on_with_what_is_held(instance: Instance, path: str, named: dict[str, Any]) -> None:
    body = request(path, True, max_tokens=12, seed=7)
    del body["model"]
    body |= named
    whole = ask(instance.url, path, body)
    assert whole.cursor is not None
    place = [ChoiceCursor(5)]
    response = go_on(
        instance.url,
        path,
        msgspec.structs.replace(whole.cursor, attempt_epoch=1, choices=place, new_tokens={}, usage_sent=False),
        body,
    )
    rest = read(response, body)
    assert rest.choices[0].token_ids == whole.choices[0].token_ids[5:]
    assert instance.engine.submits[-1].generated_token_ids == whole.choices[0].token_ids[:5]


@pytest.fixture(scope="module")
def forgetful(model: PreparedModel) -> Iterator[Instance]:
    """Exact, and it keeps no record at all."""
    exact = msgspec.structs.replace(model, quantization="int8")
    with running(exact, ApiConfig(detach_ttl_s=0.0)) as instance:
        instance.engine.choose = recite
        yield instance


@EVERY_PATH
@pytest.mark.parametrize("n", [1, 2])
def test_an_exact_stream_is_made_again_from_its_seed(forgetful: Instance, path: str, n: int) -> None:
    body = request(path, True, n=n, **FIELDS, **with_logprobs(path))
    del body["seed"]
    whole = ask(forgetful.url, path, body)
    assert whole.cursor is not None
    last = msgspec.structs.replace(whole.cursor, created_s=1767225600)
    assert go_on(forgetful.url, path, last).status_code == 404
    for choices in places(whole, every_pair=False):
        response = go_on(
            forgetful.url, path, msgspec.structs.replace(last, choices=choices, new_tokens={}, usage_sent=False), body
        )
        assert response.status_code == 200, response.text
        assert '"role"' not in response.text and "\ndata:\n" not in response.text
        assert f"chatcmpl-{last.request_id}" in response.text or "chat" not in path
        assert response.text.count('"created":1767225600') == response.text.count('"created"')
        assert_gone_on(whole, path, choices, read(response, body))
        assert forgetful.engine.submits[-1].sampling_params.seed == last.seed


BAD: list[tuple[dict[str, Any], str]] = [
    ({"stream": False, "stream_options": None}, "Last-Event-ID"),
    ({"n": 2}, "Last-Event-ID"),
    ({"seed": 8}, "seed"),
    ({"generated_token_ids": [97, 97, 97]}, "Last-Event-ID"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_a_repeated_post_that_is_another_request_is_refused(
    forgetful: Instance, fields: dict[str, Any], param: str
) -> None:
    path = "/v1/completions"
    body = request(path, True, max_tokens=5, seed=7) | fields
    response = go_on(forgetful.url, path, Cursor("a" * 32, 7, 1, [ChoiceCursor(2)]), body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_router_that_dies_leaves_a_record_with_all_tokens(instance: Instance) -> None:
    instance.engine.choose = pausing(instance, at=7)
    attempt = attempt_of("/v1/completions", request("/v1/completions", False, n=2, max_tokens=30))
    message, url = msgspec.msgpack.encode(attempt), instance.url + ATTEMPT_PATH
    with httpx.stream(
        "POST", url, content=message, headers=MSGPACK_BODY, timeout=30, verify=NO_CERTIFICATES
    ) as response:
        for line in response.iter_lines():
            if line.startswith("id: ") and is_all(instance, parse_cursor(line[4:])):
                break
        live = find(instance.url, REQUEST_ID)
    instance.wait_until(lambda: not instance.engine.running)
    record = find(instance.url, REQUEST_ID)
    assert live is not None and record is not None
    assert record.attempt.choices == live.attempt.choices and len(record.attempt.choices[0].token_ids) >= 7
    fixed = msgspec.structs.replace(record.attempt, choices=[], num_cached_tokens=None, waited_s=attempt.waited_s)
    assert fixed == attempt, "all that was fixed before the first attempt"
    instance.engine.choose, instance.engine.paused = hashed_token, False
    next_one = attempt_of("/v1/completions", {}, body=attempt.body, choices=record.attempt.choices)
    answer = msgspec.json.decode(hear(instance.url, next_one).answer or b"")
    undisturbed = msgspec.json.decode(
        hear(instance.url, attempt_of("/v1/completions", {}, body=attempt.body)).answer or b""
    )
    assert answer == undisturbed


def test_nothing_is_known_of_a_stream_that_never_was(instance: Instance) -> None:
    assert find(instance.url, "never") is None
