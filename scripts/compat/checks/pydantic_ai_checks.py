"""pydantic-ai, with its models of OpenAI's chats and responses and of Anthropic's messages."""

from checklist import ABSENT_MODEL, CAPITAL, Checklist
from pydantic import BaseModel
from pydantic_ai import Agent, Embedder, NativeOutput, ToolOutput
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

checks = Checklist()
provider = OpenAIProvider(base_url=checks.base_url, api_key="none")
model = OpenAIChatModel(checks.model, provider=provider)
FAIR = {"temperature": 0, "max_tokens": 60}
agent = Agent(model, model_settings=FAIR)


class City(BaseModel):
    """A city of the world."""

    name: str
    country: str


@checks.check("plain")
async def _():
    result = await agent.run(CAPITAL)
    assert "Paris" in result.output
    assert result.usage.output_tokens > 0


@checks.check("streamed")
async def _():
    whole = (await agent.run(CAPITAL)).output
    async with agent.run_stream(CAPITAL) as result:
        parts = [part async for part in result.stream_text(delta=True)]
    assert "".join(parts) == whole


@checks.check("tools")
async def _():
    """An output function: the model has to call it."""

    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"It is sunny in {city}."

    caller = Agent(model, model_settings=FAIR, output_type=get_weather)
    assert "sunny" in (await caller.run("What is the weather in Paris?")).output


@checks.check("tools, in several steps")
async def _():
    """The tool's result is in the conversation when the answer is made."""
    called = []

    def get_weather(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return "It is sunny."

    def choose(context):
        return {**FAIR, "tool_choice": "none" if called else "required"}

    caller = Agent(model, model_settings=choose, tools=[get_weather])
    assert (await caller.run("What is the weather in Paris?")).output
    assert called


@checks.check("structured")
async def _():
    for output in (NativeOutput(City), ToolOutput(City)):
        reader = Agent(model, model_settings={**FAIR, "max_tokens": 200}, output_type=output)
        assert isinstance((await reader.run("Tell me of Rome.")).output, City)


@checks.check("structured, streamed")
async def _():
    reader = Agent(model, model_settings={**FAIR, "max_tokens": 200}, output_type=NativeOutput(City))
    async with reader.run_stream("Tell me of Rome.") as result:
        assert isinstance(await result.get_output(), City)


@checks.check("embeddings")
async def _():
    embedder = Embedder(OpenAIEmbeddingModel(checks.model, provider=provider))
    result = await embedder.embed_documents(["the sea", "the sea", "an oak"])
    sea, again, oak = result.embeddings
    assert sea == again != oak


@checks.check("errors")
async def _():
    for asked, status in ((Agent(OpenAIChatModel(ABSENT_MODEL, provider=provider)), 404), (agent, 400)):
        try:
            await asked.run(CAPITAL, model_settings={"temperature": -1})
        except ModelHTTPError as fault:
            assert fault.status_code == status
        else:
            raise AssertionError("no error")


@checks.check("responses")
async def _():
    speaker = Agent(OpenAIResponsesModel(checks.model, provider=provider), model_settings=FAIR)
    first = await speaker.run(CAPITAL)
    assert "Paris" in first.output
    assert (await speaker.run("And of Italy?", message_history=first.all_messages())).output


@checks.check("messages")
async def _():
    local = AnthropicProvider(base_url=checks.url, api_key="none")
    speaker = Agent(AnthropicModel(checks.model, provider=local), model_settings=FAIR)
    whole = (await speaker.run(CAPITAL)).output
    assert "Paris" in whole
    async with speaker.run_stream(CAPITAL) as result:
        assert "".join([part async for part in result.stream_text(delta=True)]) == whole
