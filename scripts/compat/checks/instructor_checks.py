"""instructor, in its modes for tools and for JSON schemas."""

import instructor
import openai
from checklist import ABSENT_MODEL, CAPITAL, Checklist, expect_error
from pydantic import BaseModel

checks = Checklist()
plain_client = openai.OpenAI(base_url=checks.base_url, api_key="none", max_retries=0, timeout=300)
QUESTION = [{"role": "user", "content": "Tell me of Rome."}]
FAIR = {"model": checks.model, "temperature": 0, "max_tokens": 200, "messages": QUESTION}


class City(BaseModel):
    """A city of the world."""

    name: str
    country: str


def client_of(mode):
    return instructor.from_openai(plain_client, mode=mode)


@checks.check("plain")
def _():
    answer = client_of(instructor.Mode.TOOLS).chat.completions.create(
        response_model=None, **{**FAIR, "messages": [{"role": "user", "content": CAPITAL}]}
    )
    assert "Paris" in answer.choices[0].message.content


@checks.check("tools")
def _():
    city = client_of(instructor.Mode.TOOLS).chat.completions.create(response_model=City, max_retries=0, **FAIR)
    assert isinstance(city, City)


@checks.check("structured")
def _():
    city = client_of(instructor.Mode.JSON_SCHEMA).chat.completions.create(response_model=City, max_retries=0, **FAIR)
    assert isinstance(city, City)


@checks.check("streamed")
def _():
    parts = client_of(instructor.Mode.TOOLS).chat.completions.create_partial(response_model=City, max_retries=0, **FAIR)
    *_, last = parts
    assert last.name and last.country


@checks.check("with the answer itself")
def _():
    client = client_of(instructor.Mode.JSON_SCHEMA)
    city, answer = client.chat.completions.create_with_completion(response_model=City, max_retries=0, **FAIR)
    assert City.model_validate_json(answer.choices[0].message.content) == City(**city.model_dump())


@checks.check("errors")
def _():
    def ask(**more):
        client = client_of(instructor.Mode.TOOLS)
        return lambda: client.chat.completions.create(response_model=City, max_retries=0, **{**FAIR, **more})

    expect_error(Exception, ask(model=ABSENT_MODEL), ABSENT_MODEL)
    expect_error(Exception, ask(temperature=-1), "temperature")


checks.client_lacks("embeddings")
