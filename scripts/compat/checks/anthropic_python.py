"""The `anthropic` package for Python."""

import anthropic
from checklist import ABSENT_MODEL, CAPITAL, Checklist, expect_error

checks = Checklist()
client = anthropic.Anthropic(base_url=checks.url, api_key="none", max_retries=0, timeout=300)
FAIR = {"model": checks.model, "max_tokens": 60, "extra_body": {"temperature": 0}}
QUESTION = [{"role": "user", "content": CAPITAL}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "The weather of a city", "input_schema": SCHEMA}


@checks.check("plain")
def _():
    answer = client.messages.create(messages=QUESTION, system="Answer shortly.", **FAIR)
    assert answer.content[0].type == "text" and answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens > 0


@checks.check("streamed")
def _():
    whole = client.messages.create(messages=QUESTION, **FAIR).content[0].text
    with client.messages.stream(messages=QUESTION, **FAIR) as stream:
        words = "".join(stream.text_stream)
        assert words == stream.get_final_message().content[0].text == whole
    assert "Paris" in whole


@checks.check("tools")
def _():
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.messages.create(messages=messages, tools=[TOOL], tool_choice={"type": "any"}, **FAIR)
    [call] = [block for block in first.content if block.type == "tool_use"]
    assert first.stop_reason == "tool_use" and call.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is sunny."}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(messages=messages, tools=[TOOL], tool_choice={"type": "none"}, **FAIR)
    assert second.content[0].type == "text"


@checks.check("tools, streamed")
def _():
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(messages=messages, tools=[TOOL], tool_choice=choice, **FAIR) as stream:
        parts = "".join(event.partial_json for event in stream if event.type == "input_json")
        [call] = stream.get_final_message().content
    assert call.input["city"] in parts


@checks.check("structured")
def _():
    output = {"format": {"type": "json_schema", "schema": {**SCHEMA, "additionalProperties": False}}}
    answer = client.messages.create(messages=QUESTION, output_config=output, **FAIR)
    assert answer.content[0].text.strip().startswith("{")


@checks.check("stop sequences")
def _():
    answer = client.messages.create(messages=QUESTION, stop_sequences=["Paris"], **FAIR)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Paris")


@checks.check("count_tokens")
def _():
    counted = client.messages.count_tokens(model=checks.model, messages=QUESTION).input_tokens
    usage = client.messages.create(messages=QUESTION, **FAIR).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@checks.check("errors")
def _():
    def ask(**more):
        return lambda: client.messages.create(**{"messages": QUESTION, **FAIR, **more})

    fault = expect_error(anthropic.NotFoundError, ask(model=ABSENT_MODEL), ABSENT_MODEL)
    assert fault.body["error"]["type"] == "not_found_error"
    fault = expect_error(anthropic.BadRequestError, ask(extra_body={"temperature": -1}), "temperature")
    assert fault.body["error"]["type"] == "invalid_request_error"


@checks.check("asynchronous")
async def _():
    aclient = anthropic.AsyncAnthropic(base_url=checks.url, api_key="none", timeout=300)
    async with aclient, aclient.messages.stream(messages=QUESTION, **FAIR) as stream:
        assert "Paris" in "".join([word async for word in stream.text_stream])


checks.client_lacks("embeddings")
