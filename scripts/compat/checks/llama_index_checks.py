"""LlamaIndex, with its `OpenAILike` model and embedding."""

import openai
from checklist import ABSENT_MODEL, CAPITAL, Checklist, expect_error
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

checks = Checklist()


def model_of(**more):
    fields = {
        "model": checks.model, "api_base": checks.base_url, "api_key": "none", "temperature": 0, "max_tokens": 60,
        "is_chat_model": True, "is_function_calling_model": True, "max_retries": 0, "timeout": 300.0,
        "context_window": 2048,
    }  # fmt: skip
    return OpenAILike(**{**fields, **more})


model = model_of()
QUESTION = [ChatMessage(role="user", content=CAPITAL)]


class City(BaseModel):
    """A city of the world."""

    name: str
    country: str


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


@checks.check("plain")
def _():
    assert "Paris" in model.chat(QUESTION).message.content


@checks.check("streamed")
def _():
    assert "".join(part.delta or "" for part in model.stream_chat(QUESTION)) == model.chat(QUESTION).message.content


@checks.check("tools")
def _():
    weather = FunctionTool.from_defaults(fn=get_weather)
    answer = model.predict_and_call([weather], "What is the weather in Paris?", tool_required=True)
    assert "sunny" in str(answer)


@checks.check("structured")
def _():
    for more in ({}, {"should_use_structured_outputs": True}):
        answer = model_of(max_tokens=200, **more).as_structured_llm(City).complete("Tell me of Rome.")
        assert isinstance(answer.raw, City)


@checks.check("embeddings")
def _():
    embedding = OpenAILikeEmbedding(model_name=checks.model, api_base=checks.base_url, api_key="none")
    sea, again, oak = embedding.get_text_embedding_batch(["the sea", "the sea", "an oak"])
    assert sea == again != oak


@checks.check("errors")
def _():
    expect_error(openai.NotFoundError, lambda: model_of(model=ABSENT_MODEL).chat(QUESTION), ABSENT_MODEL)
    expect_error(openai.BadRequestError, lambda: model.chat(QUESTION, temperature=-1), "temperature")


@checks.check("completions")
def _():
    assert model_of(is_chat_model=False).complete("Once upon a time").text


@checks.check("asynchronous")
async def _():
    parts = [part.delta or "" async for part in await model.astream_chat(QUESTION)]
    assert "Paris" in "".join(parts)
