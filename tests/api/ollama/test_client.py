"""What Ollama's own Python package gets: chats, generated texts, vectors and models, streamed and not."""

from typing import Any

import httpx
import msgspec
import ollama
import pytest

from onward.web.ollama_api.ollama_paths import API_VERSION
from tests.api.instance import Instance
from tests.api.ollama.reading import CHAT, GENERATE, KINDS, MODEL, TOOLS, body_of, built, check_line, lines_of
from tests.api.small_model import END_OF_THOUGHT
from tests.api.thinking_model import CALL, TOOL, speak, tokens_of

HI = [{"role": "user", "content": "hi"}]
CALL_OF_F = {"name": "f", "arguments": {"a": 1}}


def last_prompt(instance: Instance) -> str:
    return bytes(token for token in instance.engine.submits[-1].prompt_token_ids if token < 256).decode()


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_has_what_a_whole_answer_has(keeper: Instance, http: httpx.Client, kind: str) -> None:
    speak(keeper, KINDS[kind][1])
    streamed = http.post(CHAT, json=body_of(kind))
    assert streamed.headers["content-type"] == "application/x-ndjson"
    answer = http.post(CHAT, json=body_of(kind, stream=False))
    assert answer.headers["content-type"].startswith("application/json")
    whole = answer.json()
    check_line(whole)
    assert built(lines_of(streamed.content)) == built([whole])


def test_a_chat_is_answered(keeper: Instance, client: ollama.Client) -> None:
    speak(keeper, tokens_of("né, wörds"))
    answer = client.chat(MODEL, HI)
    assert (answer.model, answer.message.role, answer.message.content) == (MODEL, "assistant", "né, wörds")
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.eval_count == len(tokens_of("né, wörds")) + 1, "the end token counts"
    assert answer.prompt_eval_count == len(keeper.engine.submits[-1].prompt_token_ids)
    assert answer.total_duration == (answer.prompt_eval_duration or 0) + (answer.eval_duration or 0) > 0


def test_a_streamed_chat_arrives_in_parts(keeper: Instance, client: ollama.Client) -> None:
    speak(keeper, tokens_of("one two"))
    parts = list(client.chat(MODEL, HI, stream=True))
    assert "".join(part.message.content or "" for part in parts) == "one two" and len(parts) > 2
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_calls_are_whole_objects_and_their_results_reach_the_prompt(keeper: Instance, client: ollama.Client) -> None:
    speak(keeper, tokens_of(CALL))
    first = client.chat(MODEL, HI, tools=[TOOL])
    [call] = first.message.tool_calls or []
    assert call.model_dump() == {"function": CALL_OF_F}
    assert first.done_reason == "stop"
    speak(keeper, tokens_of("done"))
    result = {"role": "tool", "tool_name": "f", "content": "the result"}
    assert client.chat(MODEL, [*HI, first.message, result], tools=[TOOL]).message.content == "done"
    assert "the result" in last_prompt(keeper)


def test_a_streamed_call_is_one_part(keeper: Instance, client: ollama.Client) -> None:
    speak(keeper, tokens_of("né ", CALL))
    calls = [part.message.tool_calls for part in client.chat(MODEL, HI, tools=[TOOL], stream=True)]
    assert [[call.function.model_dump() for call in some] for some in calls if some] == [[CALL_OF_F]]


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_call_that_was_cut_is_no_call(keeper: Instance, http: httpx.Client, is_streaming: bool) -> None:
    """A client would run it with other arguments than the model wrote."""
    kind = "a call that is cut off"
    speak(keeper, KINDS[kind][1])
    answer = http.post(CHAT, json=body_of(kind, stream=is_streaming))
    message = built(lines_of(answer.content) if is_streaming else [answer.json()])
    assert (message["tool_calls"], message["done_reason"]) == ([], "length")
    assert message["content"] == '{"name": "f", "arguments": {"a":'


def test_thinking_is_a_field_of_its_own(keeper: Instance, client: ollama.Client) -> None:
    speak(keeper, tokens_of("hm é", END_OF_THOUGHT, "yés"))
    message = client.chat(MODEL, HI, think=True).message
    assert (message.thinking, message.content) == ("hm é", "yés")
    generated = client.generate(MODEL, "hi", think=True)
    assert (generated.thinking, generated.response) == ("hm é", "yés")


def test_think_reaches_the_template(keeper: Instance, client: ollama.Client) -> None:
    prompts: list[list[int]] = []
    for think in (None, True, False, "high"):
        speak(keeper, tokens_of("ok"))
        client.chat(MODEL, HI, think=think)
        prompts.append(keeper.engine.submits[-1].prompt_token_ids)
    default, thinks, does_not, high = prompts
    assert thinks == high != does_not and default in (thinks, does_not)


def test_a_format_becomes_a_grammar(keeper: Instance, client: ollama.Client) -> None:
    speak(keeper, tokens_of('{"a": 1}'))
    formats: list[Any] = ["json", TOOL["function"]["parameters"]]
    for answer_format in formats:
        assert client.chat(MODEL, HI, format=answer_format).message.content == '{"a": 1}'
        assert keeper.engine.submits[-1].sampling_params.grammar is not None
    client.chat(MODEL, HI, format="")
    assert keeper.engine.submits[-1].sampling_params.grammar is None


def test_options_reach_the_sampler(keeper: Instance, client: ollama.Client) -> None:
    speak(keeper, tokens_of("ok"))
    options = {
        "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 7, "repeat_penalty": 1.5,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "num_predict": 9,
    }  # fmt: skip
    client.chat(MODEL, HI, options=options)
    sampling = keeper.engine.submits[-1].sampling_params
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty")
    assert [getattr(sampling, name) for name in names] == [0.5, 5, 0.5, 0.1, 7, 1.5, 0.5]
    assert (sampling.frequency_penalty, sampling.max_tokens) == (0.25, 9)


def test_logprobs_are_returned_for_each_token(keeper: Instance, client: ollama.Client) -> None:
    speak(keeper, tokens_of("ab"))
    whole = client.chat(MODEL, HI, logprobs=True, top_logprobs=2)
    assert [one.token for one in whole.logprobs or []][:2] == ["a", "b"]
    assert all(len(one.top_logprobs or []) == 2 for one in whole.logprobs or [])
    parts = list(client.chat(MODEL, HI, logprobs=True, top_logprobs=2, stream=True))
    streamed = [one for part in parts for one in part.logprobs or []]
    assert [one.token for one in streamed] == [one.token for one in whole.logprobs or []]


def test_an_answer_that_has_begun_is_continued(keeper: Instance, client: ollama.Client) -> None:
    speak(keeper, tokens_of(" went on"))
    begun = [*HI, {"role": "assistant", "content": "it"}]
    assert client.chat(MODEL, begun).message.content == " went on"
    assert last_prompt(keeper).endswith("it")


def test_a_text_is_generated_from_a_prompt(keeper: Instance, client: ollama.Client) -> None:
    speak(keeper, tokens_of("né"))
    answer = client.generate(MODEL, "a question", system="be brief")
    assert (answer.response, answer.done_reason) == ("né", "stop")
    assert "be brief" in last_prompt(keeper) and "a question" in last_prompt(keeper)
    parts = list(client.generate(MODEL, "a question", stream=True))
    assert "".join(part.response or "" for part in parts) == "né" and parts[-1].done


def test_a_raw_prompt_is_continued_as_it_is(keeper: Instance, client: ollama.Client) -> None:
    speak(keeper, tokens_of("né"))
    assert client.generate(MODEL, "only this", raw=True).response == "né"
    assert last_prompt(keeper) == "only this"
    parts = list(client.generate(MODEL, "only this", raw=True, stream=True))
    assert "".join(part.response or "" for part in parts) == "né" and parts[-1].done_reason == "stop"


def test_without_a_prompt_the_model_is_loaded(keeper: Instance, client: ollama.Client, http: httpx.Client) -> None:
    num_before = len(keeper.engine.submits)
    assert client.generate(MODEL).done_reason == client.chat(MODEL).done_reason == "load"
    assert client.embed(MODEL, []).embeddings == []
    streamed = list(client.generate(MODEL, stream=True))
    assert [(part.done, part.done_reason) for part in streamed] == [(True, "load")]
    assert len(keeper.engine.submits) == num_before
    with pytest.raises(ollama.ResponseError) as refused:
        client.generate("other")
    assert refused.value.status_code == 404
    assert http.post(GENERATE, json={"model": MODEL, "keep_alive": 0}).status_code == 400


def test_vectors_are_those_of_the_embeddings_endpoint(client: ollama.Client, http: httpx.Client) -> None:
    expected = http.post("/v1/embeddings", json={"model": MODEL, "input": ["a", "bc"]}).json()
    answer = client.embed(MODEL, ["a", "bc"])
    assert answer.embeddings == [one["embedding"] for one in expected["data"]]
    assert answer.prompt_eval_count == expected["usage"]["prompt_tokens"]
    assert client.embed(MODEL, "a").embeddings == answer.embeddings[:1]
    assert [len(vector) for vector in client.embed(MODEL, "a", dimensions=2).embeddings] == [2]


def test_the_served_models_are_listed(keeper: Instance, client: ollama.Client, http: httpx.Client) -> None:
    [listed], [running] = client.list().models, client.ps().models
    config = keeper.model.config
    assert listed.model == running.model == MODEL
    assert listed.digest == running.digest and len(listed.digest or "") == 64
    assert listed.details is not None and listed.details.family == config.architecture
    shown = client.show(MODEL)
    assert shown.modelinfo is not None
    assert shown.modelinfo[f"{config.architecture}.embedding_length"] == config.hidden_size
    assert shown.modelinfo[f"{config.architecture}.context_length"] == running.context_length
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert http.get("/api/version").json() == {"version": API_VERSION}


def test_a_name_may_have_the_tag_latest(keeper: Instance, client: ollama.Client) -> None:
    speak(keeper, tokens_of("ok"))
    answer = client.chat(f"{MODEL}:latest", HI)
    assert (answer.model, answer.message.content) == (f"{MODEL}:latest", "ok")
    assert client.show(f"{MODEL}:latest").details is not None


def test_a_request_has_an_id_by_which_it_can_be_aborted(keeper: Instance, http: httpx.Client) -> None:
    speak(keeper, tokens_of("ok"))
    named = http.post(CHAT, json=body_of("words"), headers={"x-request-id": "mine"})
    assert named.headers["x-request-id"] == "mine"
    other = http.post(CHAT, json=body_of("words", stream=False)).headers["x-request-id"]
    assert keeper.engine.submits[-1].request_id.startswith(other)


def test_a_client_cannot_enter_the_stream_of_another_form(keeper: Instance, http: httpx.Client) -> None:
    """Lines have no ids, so a `Last-Event-ID` names no place in them. The answer is whole."""
    speak(keeper, tokens_of("one two"))
    chat = {"model": MODEL, "messages": HI, "stream": True, "seed": 7}
    events = http.post("/v1/chat/completions", json=chat).text
    cursors = [line.removeprefix("id: ") for line in events.split("\n") if line.startswith("id: ")]
    answer = http.post(CHAT, json=body_of("words", **TOOLS), headers={"last-event-id": cursors[2]})
    assert built(lines_of(answer.content))["content"] == "one two"


def test_a_silent_stream_is_kept_alive_by_lines_without_text() -> None:
    from onward.web.ollama_api.answer_kind import AnswerKind
    from onward.web.ollama_api.ollama_answers import OllamaAnswerWriter

    writer = OllamaAnswerWriter("m", AnswerKind.CHAT)
    [line] = writer.lines(b": waiting\n\n", 0.0).splitlines()
    assert msgspec.json.decode(line) == {
        "model": "m",
        "created_at": "1970-01-01T00:00:00.000000Z",
        "message": {"role": "assistant", "content": ""},
        "done": False,
    }
    assert writer.lines(b'id: 1;a\ndata:\n\ndata: {"choi', 0.0) == b""
