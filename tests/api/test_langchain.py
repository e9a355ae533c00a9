"""`langchain-openai` against the real api process: chats, streams, tools, structured answers, embeddings."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, SecretStr

from onward.proto.model import PreparedModel
from tests.api.instance import Instance, running
from tests.api.small_model import END_OF_THOUGHT
from tests.api.stand_in_engine import made_up_vector
from tests.api.thinking_model import prepare, speak, tokens_of

KEY = SecretStr("none")
CALL = '<tool_call>{"name":"add","arguments":{"a":2,"b":3}}</tool_call>'
FORCED = '[{"name": "add", "parameters": {"a": 2, "b": 3}}]'
BOOK = '{"title": "é", "pages": 3}'


class Book(BaseModel):
    title: str
    pages: int


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    """In a folder of the model's name, as tokenizers are looked for."""
    folder = tmp_path_factory.mktemp("models") / "small-model"
    folder.mkdir()
    return prepare(folder)


@pytest.fixture(scope="module")
def thinker(thinking_model: PreparedModel) -> Iterator[Instance]:
    with running(thinking_model) as instance:
        yield instance


@pytest.fixture
def chat(thinker: Instance) -> ChatOpenAI:
    return ChatOpenAI(
        model="small-model",
        base_url=f"{thinker.url}/v1",
        api_key=KEY,
        max_retries=0,
        timeout=30,
        max_tokens=200,
        seed=7,
    )


def embeddings_at(instance: Instance, **fields: Any) -> OpenAIEmbeddings:
    return OpenAIEmbeddings(
        model="small-model", base_url=f"{instance.url}/v1", api_key=KEY, max_retries=0, timeout=30, **fields
    )


def whole(chunks: Iterator[Any]) -> AIMessageChunk:
    first, *rest = list(chunks)
    return sum(rest, first)


def test_a_chat_is_answered_whole_and_says_what_it_has_used(thinker: Instance, chat: ChatOpenAI) -> None:
    speak(thinker, tokens_of("words"))
    answer = chat.invoke([SystemMessage("be brief"), HumanMessage("hi")])
    assert (answer.content, answer.response_metadata["finish_reason"]) == ("words", "stop")
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] == len("words") + 1


def test_a_chat_is_streamed_with_its_usage(thinker: Instance, chat: ChatOpenAI) -> None:
    speak(thinker, tokens_of("many words"))
    chunks = list(chat.stream("hi", stream_usage=True))
    assert len(chunks) > 2
    answer = whole(iter(chunks))
    assert answer.content == "many words"
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] == len("many words") + 1


def test_thinking_is_counted_where_langchain_looks_for_it(thinker: Instance, chat: ChatOpenAI) -> None:
    speak(thinker, tokens_of("hm", END_OF_THOUGHT, "yes"))
    answer = chat.invoke("hi", extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    assert isinstance(answer, AIMessage) and answer.content == "yes"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata.get("output_token_details") == {"reasoning": 2}


def test_many_are_asked_at_once_and_asynchronously(thinker: Instance, chat: ChatOpenAI) -> None:
    speak(thinker, tokens_of("words"))
    assert [one.content for one in chat.batch(["a", "b", "c"])] == ["words"] * 3

    async def both() -> tuple[Any, str]:
        parts = [str(chunk.content) async for chunk in chat.astream("d")]
        return (await chat.ainvoke("e")).content, "".join(parts)

    assert asyncio.run(both()) == ("words", "words")


@pytest.mark.parametrize(("choice", "output"), [("auto", CALL), ("required", FORCED), ("add", FORCED)])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_tools_are_called_whatever_the_choice(
    thinker: Instance, chat: ChatOpenAI, choice: str, output: str, streamed: bool
) -> None:
    speak(thinker, tokens_of(output))
    bound = chat.bind_tools([add], tool_choice=choice)
    answer = whole(bound.stream("2 + 3?")) if streamed else bound.invoke("2 + 3?")
    assert isinstance(answer, AIMessage)
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 2, "b": 3})


def test_a_tool_s_result_goes_back_to_the_model(thinker: Instance, chat: ChatOpenAI) -> None:
    speak(thinker, tokens_of(CALL))
    bound = chat.bind_tools([add])
    asked = HumanMessage("2 + 3?")
    called = bound.invoke([asked])
    assert isinstance(called, AIMessage)
    result = add.invoke(called.tool_calls[0])
    assert isinstance(result, ToolMessage) and result.content == "5"
    speak(thinker, tokens_of("five"))
    assert bound.invoke([asked, called, result]).content == "five"
    prompt = bytes(token for token in thinker.engine.submits[-1].prompt_token_ids if token < 256).decode()
    assert '"arguments": {"a": 2, "b": 3}' in prompt and "tool\n5" in prompt


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # langchain's own, with any server
@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_answers_become_models(
    thinker: Instance, chat: ChatOpenAI, method: Literal["json_schema", "json_mode", "function_calling"]
) -> None:
    output = f'[{{"name": "Book", "parameters": {BOOK}}}]' if method == "function_calling" else BOOK
    speak(thinker, tokens_of(output))
    structured = chat.with_structured_output(Book, method=method)
    assert structured.invoke("a book") == Book(title="é", pages=3)
    assert list(structured.stream("a book"))[-1] == Book(title="é", pages=3)


def test_completions_are_answered_and_streamed(thinker: Instance) -> None:
    with_text = OpenAI(
        model="small-model", base_url=f"{thinker.url}/v1", api_key=KEY, max_retries=0, timeout=30, max_tokens=5, seed=7
    )
    thinker.engine.choose = lambda prompt, sampling, tokens: b"words"[len(tokens)]
    assert with_text.invoke("abc") == "words"
    assert "".join(with_text.stream("abc")) == "words"


def test_texts_are_embedded_as_they_are(thinker: Instance) -> None:
    embeddings = embeddings_at(thinker, check_embedding_ctx_length=False)
    of_many, of_one = embeddings.embed_documents(["abc", "de"]), embeddings.embed_query("abc")
    assert of_many[0] == of_one != of_many[1]
    assert of_one == pytest.approx(_unit(made_up_vector(b"abc", "mean")), rel=1e-5)


@pytest.mark.full  # transformers and torch are imported
def test_texts_are_embedded_as_token_ids_where_langchain_makes_them(
    thinker: Instance, thinking_model: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(thinking_model.folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    monkeypatch.chdir(folder.parent)
    embeddings = embeddings_at(thinker, tiktoken_enabled=False, embedding_ctx_length=4)
    assert embeddings.embed_query("abc") == pytest.approx(_unit(made_up_vector(b"abc", "mean")), rel=1e-5)
    assert thinker.engine.submits[-1].prompt_token_ids == [*b"abc"]
    embeddings.embed_query("abcdef")
    assert [one.prompt_token_ids for one in thinker.engine.submits[-2:]] == [[*b"abcd"], [*b"ef"]]


def _unit(numbers: list[float]) -> list[float]:
    length = sum(number * number for number in numbers) ** 0.5
    return [number / length for number in numbers]
