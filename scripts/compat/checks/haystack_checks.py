"""Haystack, with its OpenAI components."""

from typing import Annotated

import openai
from checklist import ABSENT_MODEL, CAPITAL, Checklist, expect_error
from haystack import Document, Pipeline
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret
from pydantic import BaseModel

checks = Checklist()
ADDRESS = {"api_key": Secret.from_token("none"), "api_base_url": checks.base_url}
FAIR = {"temperature": 0, "max_tokens": 60}
QUESTION = [ChatMessage.from_user(CAPITAL)]


class City(BaseModel):
    name: str
    country: str


@tool
def get_weather(city: Annotated[str, "the city"]) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


def generator(name=checks.model, callback=None, **more):
    return OpenAIChatGenerator(
        model=name,
        generation_kwargs={**FAIR, **more},
        streaming_callback=callback,
        tools_strict=True,
        max_retries=0,
        timeout=300,
        **ADDRESS,
    )


@checks.check("plain")
def _():
    assert "Paris" in generator().run(messages=QUESTION)["replies"][0].text


@checks.check("streamed")
def _():
    parts = []
    answer = generator(callback=lambda chunk: parts.append(chunk.content)).run(messages=QUESTION)["replies"][0].text
    assert "".join(parts) == answer == generator().run(messages=QUESTION)["replies"][0].text


@checks.check("tools")
def _():
    question = [ChatMessage.from_user("What is the weather in Paris?")]
    called = generator(tool_choice="required").run(messages=question, tools=[get_weather])["replies"]
    [call] = called[0].tool_calls
    result = get_weather.invoke(**call.arguments)
    assert "sunny" in result
    messages = [*question, *called, ChatMessage.from_tool(result, origin=call)]
    assert generator(tool_choice="none").run(messages=messages, tools=[get_weather])["replies"][0].text


@checks.check("agent")
def _():
    chat = generator(tool_choice="required")
    agent = Agent(chat_generator=chat, tools=[get_weather], exit_conditions=["get_weather"])
    messages = agent.run(messages=[ChatMessage.from_user("What is the weather in Paris?")])["messages"]
    assert "sunny" in messages[-1].tool_call_result.result


@checks.check("structured")
def _():
    answer = generator(response_format=City, max_tokens=200).run(messages=QUESTION)["replies"][0].text
    City.model_validate_json(answer)


@checks.check("embeddings")
def _():
    text = OpenAITextEmbedder(model=checks.model, **ADDRESS).run(text="the sea")["embedding"]
    documents = [Document(content="the sea"), Document(content="an oak")]
    embedded = OpenAIDocumentEmbedder(model=checks.model, progress_bar=False, **ADDRESS).run(documents=documents)
    sea, oak = (document.embedding for document in embedded["documents"])
    assert text == sea != oak


@checks.check("errors")
def _():
    expect_error(openai.NotFoundError, lambda: generator(ABSENT_MODEL).run(messages=QUESTION), ABSENT_MODEL)
    expect_error(openai.BadRequestError, lambda: generator(temperature=-1).run(messages=QUESTION), "temperature")


@checks.check("pipeline")
def _():
    pipeline = Pipeline()
    pipeline.add_component("chat", generator())
    assert "Paris" in pipeline.run({"chat": {"messages": QUESTION}})["chat"]["replies"][0].text


@checks.check("responses")
def _():
    chat = OpenAIResponsesChatGenerator(
        model=checks.model, generation_kwargs={"temperature": 0, "max_output_tokens": 60}, **ADDRESS
    )
    assert "Paris" in chat.run(messages=QUESTION)["replies"][0].text
