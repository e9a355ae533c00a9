"""guidance, with its model of servers that speak OpenAI's protocol."""

import guidance
from checklist import ABSENT_MODEL, Checklist, expect_error
from guidance import assistant, gen, system, user
from guidance import json as gen_json

checks = Checklist()
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "country": {"type": "string"}},
    "required": ["name", "country"],
    "additionalProperties": False,
}


def model_of(name=checks.model):
    return guidance.models.OpenAI(name, api_key="none", base_url=checks.base_url, echo=False)


def ask(model, question, what):
    with system():
        model += "You answer shortly."
    with user():
        model += question
    with assistant():
        model += what
    return model


@checks.check("plain")
def _():
    assert ask(model_of(), "What is the capital of France?", gen(name="answer", max_tokens=30, temperature=0))["answer"]


@checks.check("structured")
def _():
    model = ask(model_of(), "Tell me of Rome.", gen_json(name="answer", schema=SCHEMA, max_tokens=200))
    assert '"name"' in model["answer"]


@checks.check("streamed")
def _():
    @guidance.guidance
    def answer(lm):
        return ask(lm, "What is the capital of France?", gen(name="answer", max_tokens=30, temperature=0))

    *parts, last = model_of().stream() + answer()
    assert len(parts) > 1 and last["answer"]


@checks.check("tools")
def _():
    """The model may call the tool or answer: the client has no way to force a call."""

    def get_weather(city: str):
        """The weather of a city."""
        return f"It is sunny in {city}."

    with user():
        model = model_of() + "What is the weather in Paris?"
    before = str(model)
    with assistant():
        model += gen(tools=[get_weather])
    assert len(str(model)) > len(before)


@checks.check("errors")
def _():
    expect_error(Exception, lambda: ask(model_of(ABSENT_MODEL), "Hello", gen(max_tokens=5)), ABSENT_MODEL)


checks.client_lacks("embeddings")
