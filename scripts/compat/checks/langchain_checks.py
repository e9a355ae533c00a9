"""LangChain, with `langchain-openai` and `langchain-anthropic`."""

import anthropic
import openai
from checklist import ABSENT_MODEL, CAPITAL, Checklist, expect_error
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict

checks = Checklist()
ADDRESS = {"base_url": checks.base_url, "api_key": "none"}
FAIR = {"model": checks.model, "temperature": 0, "timeout": 300, "max_retries": 0}
model = ChatOpenAI(**FAIR, **ADDRESS, max_tokens=60)


class City(BaseModel):
    """A city of the world."""

    model_config = ConfigDict(extra="forbid")  # the small model adds fields without end otherwise
    name: str
    country: str


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


def anthropic_model(**more):
    return ChatAnthropic(**{**FAIR, "base_url": checks.url, "api_key": "none", "max_tokens": 60, **more})


def call_tool(chat, choice, done):
    """A call that has to be made, and the answer to its result."""
    question = HumanMessage("What is the weather in Paris?")
    first = chat.bind_tools([get_weather], tool_choice=choice).invoke([question])
    [call] = first.tool_calls
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage) and "sunny" in result.content
    assert chat.bind_tools([get_weather], tool_choice=done).invoke([question, first, result]).content


@checks.check("plain")
def _():
    assert "Paris" in model.invoke(CAPITAL).content


@checks.check("streamed")
def _():
    assert "".join(chunk.content for chunk in model.stream(CAPITAL)) == model.invoke(CAPITAL).content


@checks.check("tools")
def _():
    call_tool(model, "required", "none")


@checks.check("structured")
def _():
    for method in ("json_schema", "function_calling"):
        reader = ChatOpenAI(**FAIR, **ADDRESS, max_tokens=200).with_structured_output(City, method=method)
        assert isinstance(reader.invoke("Tell me of Rome."), City)


@checks.check("embeddings")
def _():
    embeddings = OpenAIEmbeddings(model=checks.model, check_embedding_ctx_length=False, **ADDRESS)
    sea, again, oak = embeddings.embed_documents(["the sea", "the sea", "an oak"])
    assert sea == again != oak


@checks.check("embeddings of token ids")
def _():
    embeddings = OpenAIEmbeddings(
        model=checks.model, tiktoken_enabled=False, check_embedding_ctx_length=False, **ADDRESS
    )
    assert embeddings.embed_query("the sea") == embeddings.embed_documents(["the sea"])[0]


@checks.check("errors")
def _():
    absent = ChatOpenAI(**{**FAIR, **ADDRESS, "model": ABSENT_MODEL})
    expect_error(openai.NotFoundError, lambda: absent.invoke(CAPITAL), ABSENT_MODEL)
    expect_error(openai.BadRequestError, lambda: model.bind(temperature=-1).invoke(CAPITAL), "temperature")


@checks.check("batch")
def _():
    assert len({answer.content for answer in model.batch([CAPITAL] * 3)}) == 1


@checks.check("completions")
def _():
    assert OpenAI(**FAIR, **ADDRESS, max_tokens=8).invoke("Once upon a time")


@checks.check("responses")
def _():
    chat = ChatOpenAI(**FAIR, **ADDRESS, max_tokens=60, use_responses_api=True)
    whole = chat.invoke(CAPITAL)
    assert "Paris" in whole.text
    assert "".join(chunk.text for chunk in chat.stream(CAPITAL)) == whole.text


@checks.check("messages")
def _():
    chat = anthropic_model()
    whole = chat.invoke(CAPITAL)
    assert "Paris" in whole.text
    assert "".join(chunk.text for chunk in chat.stream(CAPITAL)) == whole.text
    expect_error(anthropic.NotFoundError, lambda: anthropic_model(model=ABSENT_MODEL).invoke(CAPITAL), ABSENT_MODEL)


@checks.check("messages, tools")
def _():
    call_tool(anthropic_model(), "any", {"type": "none"})


@checks.check("asynchronous")
async def _():
    assert "Paris" in "".join([chunk.content async for chunk in model.astream(CAPITAL)])
