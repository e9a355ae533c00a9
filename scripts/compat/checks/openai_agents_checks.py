"""openai-agents, with its models of OpenAI's chats and responses."""

import agents
import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from checklist import ABSENT_MODEL, CAPITAL, Checklist
from pydantic import BaseModel

checks = Checklist()
agents.set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=checks.base_url, api_key="none", max_retries=0, timeout=300)
KINDS = {"": OpenAIChatCompletionsModel, "responses, ": OpenAIResponsesModel}


class City(BaseModel):
    """A city of the world."""

    name: str
    country: str


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


def agent_of(kind, model=checks.model, max_tokens=60, choice=None, **more):
    settings = ModelSettings(temperature=0, max_tokens=max_tokens, tool_choice=choice)
    return Agent(name="helper", model=kind(model, openai_client=client), model_settings=settings, **more)


async def check_stream(kind):
    whole = (await Runner.run(agent_of(kind), CAPITAL)).final_output
    result = Runner.run_streamed(agent_of(kind), CAPITAL)
    deltas = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == result.final_output == whole
    assert "Paris" in whole


async def check_tools(kind):
    """The tool has to be called in the first turn; the choice is free in the second."""
    asked = agent_of(kind, choice="required", tools=[get_weather])
    result = await Runner.run(asked, "What is the weather in Paris?", max_turns=6)
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert "sunny" in outputs[0]
    assert result.final_output


async def check_structure(kind):
    result = await Runner.run(agent_of(kind, max_tokens=200, output_type=City), "Tell me of Rome.")
    assert isinstance(result.final_output, City)


async def check_errors(kind):
    for model, temperature, expected in (
        (ABSENT_MODEL, 0, openai.NotFoundError),
        (checks.model, -1, openai.BadRequestError),
    ):
        asked = agent_of(kind, model)
        asked.model_settings.temperature = temperature
        try:
            await Runner.run(asked, CAPITAL)
        except expected:
            continue
        raise AssertionError(f"no {expected.__name__}")


for prefix, kind in KINDS.items():

    @checks.check(prefix + "plain")
    async def _(kind=kind):
        assert "Paris" in (await Runner.run(agent_of(kind), CAPITAL)).final_output

    @checks.check(prefix + "streamed")
    async def _(kind=kind):
        await check_stream(kind)

    @checks.check(prefix + "tools")
    async def _(kind=kind):
        await check_tools(kind)

    @checks.check(prefix + "structured")
    async def _(kind=kind):
        await check_structure(kind)

    @checks.check(prefix + "errors")
    async def _(kind=kind):
        await check_errors(kind)


checks.client_lacks("embeddings")
