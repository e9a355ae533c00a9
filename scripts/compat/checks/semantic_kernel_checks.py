"""Semantic Kernel, with its OpenAI connectors."""

import openai
from checklist import ABSENT_MODEL, CAPITAL, Checklist
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextEmbedding,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.exceptions import ServiceResponseException
from semantic_kernel.functions import kernel_function

checks = Checklist()
client = openai.AsyncOpenAI(base_url=checks.base_url, api_key="none", max_retries=0, timeout=300)
service = OpenAIChatCompletion(ai_model_id=checks.model, async_client=client)


class City(BaseModel):
    name: str
    country: str


class Weather:
    def __init__(self):
        self.called = []

    @kernel_function(description="The weather of a city")
    def get_weather(self, city: str) -> str:
        self.called.append(city)
        return f"It is sunny in {city}."


def settings(**more):
    return OpenAIChatPromptExecutionSettings(**{"temperature": 0, "max_tokens": 60, **more})


def history(text=CAPITAL):
    chat = ChatHistory()
    chat.add_user_message(text)
    return chat


@checks.check("plain")
async def _():
    assert "Paris" in str(await service.get_chat_message_content(history(), settings()))


@checks.check("streamed")
async def _():
    whole = str(await service.get_chat_message_content(history(), settings()))
    parts = [str(part) async for part in service.get_streaming_chat_message_content(history(), settings())]
    assert "".join(parts) == whole


@checks.check("tools")
async def _():
    kernel, weather = Kernel(), Weather()
    kernel.add_service(service)
    kernel.add_plugin(weather, "weather")
    chosen = settings(function_choice_behavior=FunctionChoiceBehavior.Required(), max_tokens=100)
    await service.get_chat_message_content(history("What is the weather in Paris?"), chosen, kernel=kernel)
    assert weather.called


@checks.check("structured")
async def _():
    answer = await service.get_chat_message_content(history(), settings(response_format=City, max_tokens=200))
    City.model_validate_json(str(answer))


@checks.check("embeddings")
async def _():
    embedding = OpenAITextEmbedding(ai_model_id=checks.model, async_client=client)
    sea, again, oak = await embedding.generate_embeddings(["the sea", "the sea", "an oak"])
    assert list(sea) == list(again) != list(oak)


@checks.check("errors")
async def _():
    absent = OpenAIChatCompletion(ai_model_id=ABSENT_MODEL, async_client=client)
    for asked, word in ((absent, ABSENT_MODEL), (service, "penalty")):
        try:
            await asked.get_chat_message_content(history(), settings(extra_body={"frequency_penalty": 7}))
        except ServiceResponseException as fault:
            assert word in str(fault), fault
        else:
            raise AssertionError("no error")
