"""DSPy, over LiteLLM."""

import dspy
from checklist import ABSENT_MODEL, CAPITAL, Checklist, expect_error
from pydantic import BaseModel, ConfigDict

checks = Checklist()


def model_of(name=checks.model, **more):
    fields = {"temperature": 0, "max_tokens": 300, "cache": False, "num_retries": 0, **more}
    return dspy.LM(f"openai/{name}", api_base=checks.base_url, api_key="none", model_type="chat", **fields)


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    country: str


class Cities(BaseModel):
    city: City


class Answer(BaseModel):
    answer: str


def schema_of(outputs):
    """DSPy's list of models lacks the served one, so a program has to ask for the schema itself."""
    schema = {"name": outputs.__name__, "schema": outputs.model_json_schema(), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


class DescribeCity(dspy.Signature):
    """Describe the city."""

    question: str = dspy.InputField()
    city: City = dspy.OutputField()


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


dspy.configure(lm=model_of())


@checks.check("plain")
def _():
    [answer] = model_of()(CAPITAL)
    assert "Paris" in str(answer)


@checks.check("structured")
def _():
    with dspy.context(adapter=dspy.JSONAdapter()):
        predict = dspy.Predict(DescribeCity, **schema_of(Cities))
        assert isinstance(predict(question="Tell me of Rome.").city, City)


@checks.check("streamed")
async def _():
    with dspy.context(adapter=dspy.JSONAdapter()):
        listener = dspy.streaming.StreamListener(signature_field_name="answer")
        program = dspy.streamify(dspy.Predict("question -> answer", **schema_of(Answer)), stream_listeners=[listener])
        parts = [part async for part in program(question=CAPITAL)]
    words = [part.chunk for part in parts if isinstance(part, dspy.streaming.StreamResponse)]
    [prediction] = [part for part in parts if isinstance(part, dspy.Prediction)]
    assert prediction.answer and words


@checks.check("tools")
def _():
    weather = dspy.Tool(get_weather)
    answer = model_of(tool_choice="required")(
        "What is the weather in Paris?", tools=[weather.format_as_litellm_function_call()]
    )
    assert answer[0]["tool_calls"][0].function.name == "get_weather"


@checks.check("embeddings")
def _():
    embedder = dspy.Embedder(f"openai/{checks.model}", api_base=checks.base_url, api_key="none", caching=False)
    sea, again, oak = embedder(["the sea", "the sea", "an oak"])
    assert list(sea) == list(again) != list(oak)


@checks.check("errors")
def _():
    expect_error(Exception, lambda: model_of(ABSENT_MODEL)(CAPITAL), ABSENT_MODEL)
    expect_error(Exception, lambda: model_of(temperature=-1)(CAPITAL), "temperature")
