"""The `openai` package for Python."""

import json

import openai
from checklist import ABSENT_MODEL, CAPITAL, Checklist, expect_error
from pydantic import BaseModel

checks = Checklist()
client = openai.OpenAI(base_url=checks.base_url, api_key="none", max_retries=0, timeout=300)
QUESTION = [{"role": "user", "content": CAPITAL}]
FAIR = {"model": checks.model, "temperature": 0, "max_tokens": 60}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    },
}


class City(BaseModel):
    name: str
    country: str


@checks.check("plain")
def _():
    answer = client.chat.completions.create(messages=QUESTION, **FAIR)
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@checks.check("streamed")
def _():
    whole = client.chat.completions.create(messages=QUESTION, **FAIR).choices[0].message.content
    chunks = client.chat.completions.create(messages=QUESTION, stream=True, **FAIR)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


@checks.check("tools")
def _():
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.chat.completions.create(messages=messages, tools=[TOOL], tool_choice="required", **FAIR)
    message = first.choices[0].message
    call = message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)["city"] in ("Paris", "Rome")) == (
        "get_weather",
        True,
    )
    messages += [message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."}]
    second = client.chat.completions.create(messages=messages, tools=[TOOL], tool_choice="none", **FAIR)
    assert second.choices[0].message.content


@checks.check("tools, streamed")
def _():
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    tools = [openai.pydantic_function_tool(City)]
    with client.chat.completions.stream(messages=messages, tools=tools, tool_choice="required", **FAIR) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, City)


@checks.check("structured")
def _():
    answer = client.chat.completions.parse(messages=QUESTION, response_format=City, **FAIR | {"max_tokens": 200})
    assert isinstance(answer.choices[0].message.parsed, City)


@checks.check("embeddings")
def _():
    sea, again, oak = client.embeddings.create(model=checks.model, input=["the sea", "the sea", "an oak"]).data
    assert sea.embedding == again.embedding != oak.embedding


@checks.check("errors")
def _():
    def ask(**more):
        return lambda: client.chat.completions.create(**{"messages": QUESTION, **FAIR, **more})

    assert expect_error(openai.NotFoundError, ask(model=ABSENT_MODEL), ABSENT_MODEL).param == "model"
    assert expect_error(openai.BadRequestError, ask(temperature=-1)).param == "temperature"
    assert expect_error(openai.BadRequestError, ask(messages=[{"role": "user", "content": "a " * 20000}])).code


@checks.check("completions")
def _():
    answer = client.completions.create(
        prompt="Once upon a time", n=2, logprobs=2, seed=1, model=checks.model, max_tokens=8
    )
    assert [len(choice.logprobs.tokens) for choice in answer.choices] == [8, 8]


@checks.check("logprobs")
def _():
    answer = client.chat.completions.create(messages=QUESTION, logprobs=True, top_logprobs=3, **FAIR)
    tokens = answer.choices[0].logprobs.content
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in tokens)
    assert "".join(token.token for token in tokens).startswith(answer.choices[0].message.content[:10])


@checks.check("responses")
def _():
    first = client.responses.create(model=checks.model, input=CAPITAL, temperature=0, max_output_tokens=60)
    assert "Paris" in first.output_text
    second = client.responses.create(
        model=checks.model, input="And of Italy?", previous_response_id=first.id, max_output_tokens=20
    )
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)


@checks.check("responses, streamed")
def _():
    with client.responses.stream(model=checks.model, input=CAPITAL, temperature=0, max_output_tokens=60) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == deltas


@checks.check("responses, structured")
def _():
    answer = client.responses.parse(model=checks.model, input=CAPITAL, text_format=City, max_output_tokens=200)
    assert isinstance(answer.output_parsed, City)


@checks.check("models")
def _():
    assert checks.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(checks.model).id == checks.model


@checks.check("asynchronous")
async def _():
    async with openai.AsyncOpenAI(base_url=checks.base_url, api_key="none", timeout=300) as aclient:
        stream = await aclient.chat.completions.create(messages=QUESTION, stream=True, **FAIR)
        words = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "Paris" in "".join(words)
