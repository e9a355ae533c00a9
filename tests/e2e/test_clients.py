"""What people have, against the whole server with the real model: `openai`, `langchain-openai`, batch files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from onward.cli.main import run
from tests.e2e.pd_instances import SMALL
from tests.e2e.server import Server

MODEL = "smollm2-135m-instruct"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
FAIR: Any = {"model": MODEL, "temperature": 0, "max_tokens": 40}


class City(BaseModel):
    """A city of the world."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    is_capital: bool


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*SMALL) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def chain(server: Server) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=server.url + "/v1", api_key=SecretStr("none"), temperature=0, max_tokens=80, timeout=120
    )


def test_the_stream_helper_has_the_words_one_after_the_other_and_the_answer_at_the_end(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(messages=QUESTION, stream_options={"include_usage": True}, **FAIR) as stream:
        said = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert final.choices[0].message.content == said and "Paris" in said
    assert final.usage is not None and final.usage.completion_tokens > 1


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "City"}}], ids=str)
def test_tools_are_offered_and_calls_that_must_be_made_are(client: openai.OpenAI, choice: Any) -> None:
    tools: Any = {"tools": [openai.pydantic_function_tool(City)], "tool_choice": choice, "parallel_tool_calls": False}
    with client.chat.completions.stream(messages=QUESTION, **tools, **FAIR) as stream:
        final = stream.get_final_completion().choices[0]
    for call in final.message.tool_calls or []:
        assert isinstance(call.function.parsed_arguments, City)
    if choice != "auto":
        assert len(final.message.tool_calls or []) == 1


def test_the_same_text_has_the_same_vector_and_another_has_another(client: openai.OpenAI) -> None:
    told = client.embeddings.create(model=MODEL, input=["the sea", "the sea", "an oak"])
    first, second, third = [one.embedding for one in told.data]
    assert first == second != third
    assert sum(number * number for number in first) == pytest.approx(1.0, abs=1e-4)
    shorter = client.embeddings.create(model=MODEL, input="the sea", dimensions=64, encoding_format="float")
    assert len(shorter.data[0].embedding) == 64


def test_a_batch_file_as_openai_s_guide_writes_it_is_answered_at_a_server(server: Server, tmp_path: Path) -> None:
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "request-1": ("/v1/chat/completions", {"messages": QUESTION, **FAIR}),
        "request-2": ("/v1/completions", {"prompt": "Once upon a time", **FAIR}),
        "request-3": ("/v1/embeddings", {"model": MODEL, "input": "the sea"}),
        "request-4": ("/v1/chat/completions", {"messages": QUESTION, **FAIR, "model": "gpt-3.5-turbo-0125"}),
    }
    source, out = tmp_path / "batch.jsonl", tmp_path / "answers.jsonl"
    lines = [{"custom_id": name, "method": "POST", "url": url, "body": body} for name, (url, body) in asked.items()]
    source.write_text("".join(json.dumps(one) + "\n" for one in lines))
    run(["run-batch", str(source), str(out), "--url", server.url])
    answers = {one["custom_id"]: one for one in map(json.loads, out.read_text().splitlines())}
    bodies = {name: answers[name]["response"]["body"] for name in asked}
    assert "Paris" in (ChatCompletion.model_validate(bodies["request-1"]).choices[0].message.content or "")
    assert Completion.model_validate(bodies["request-2"]).choices[0].text
    assert CreateEmbeddingResponse.model_validate(bodies["request-3"]).data[0].embedding
    assert (answers["request-4"]["response"]["status_code"], bodies["request-4"]["error"]["param"]) == (404, "model")


def test_langchain_asks_and_streams(chain: ChatOpenAI) -> None:
    question = QUESTION[0]["content"]
    whole = chain.invoke(question)
    assert "Paris" in str(whole.content)
    assert "".join(str(chunk.content) for chunk in chain.stream(question)) == whole.content
    assert [one.content for one in chain.batch([question] * 3)] == [whole.content] * 3


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # langchain's own, with any server
def test_langchain_reads_answers_into_models_and_has_its_tools_called(chain: ChatOpenAI) -> None:
    assert isinstance(chain.with_structured_output(City).invoke("Tell me of Rome."), City)
    called = chain.bind_tools([City], tool_choice="City").invoke("Tell me of Rome.")
    assert isinstance(called, AIMessage)
    [call] = called.tool_calls
    assert isinstance(City(**call["args"]), City)


def test_langchain_embeds_texts(server: Server, client: openai.OpenAI) -> None:
    embeddings = OpenAIEmbeddings(
        model=MODEL, base_url=server.url + "/v1", api_key=SecretStr("none"), check_embedding_ctx_length=False
    )
    expected = client.embeddings.create(model=MODEL, input="the sea").data[0].embedding
    assert embeddings.embed_query("the sea") == pytest.approx(expected, abs=1e-6)
