"""outlines, with its models of OpenAI's, vLLM's and SGLang's servers."""

import enum
import re
from typing import Literal

import openai
import outlines
from checklist import ABSENT_MODEL, CAPITAL, Checklist, expect_error
from outlines.types import CFG, Regex
from pydantic import BaseModel, ConfigDict

checks = Checklist()
client = openai.OpenAI(base_url=checks.base_url, api_key="none", max_retries=0, timeout=300)
model = outlines.from_openai(client, checks.model)
FAIR = {"temperature": 0, "max_tokens": 100}


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")  # the small model adds fields without end otherwise
    name: str
    country: str


class Answer(enum.Enum):
    YES = "yes"
    NO = "no"


@checks.check("plain")
def _():
    assert "Paris" in model(CAPITAL, **FAIR)


@checks.check("streamed")
def _():
    assert "".join(model.stream(CAPITAL, **FAIR)) == model(CAPITAL, **FAIR)


@checks.check("structured")
def _():
    City.model_validate_json(model("Tell me of Rome.", City, **FAIR))


@checks.check("vLLM's fields")
def _():
    vllm = outlines.from_vllm(client, checks.model)
    City.model_validate_json(vllm("Tell me of Rome.", City, **FAIR))
    assert vllm("Is Rome in Italy?", Literal["yes", "no"], **FAIR) in ("yes", "no")
    assert re.fullmatch(r"\d{4}", vllm("A year?", Regex(r"\d{4}"), **FAIR))
    assert vllm("Yes or no?", CFG('start: "yes" | "no"'), **FAIR) in ("yes", "no")


@checks.check("SGLang's fields")
def _():
    sglang = outlines.from_sglang(client, checks.model)
    City.model_validate_json(sglang("Tell me of Rome.", City, **FAIR))
    assert sglang("Is Rome in Italy?", Answer, **FAIR) in ("yes", "no")
    assert re.fullmatch(r"\d{4}", sglang("A year?", Regex(r"\d{4}"), **FAIR))
    assert sglang("Yes or no?", CFG('root ::= "yes" | "no"'), **FAIR) in ("yes", "no")


@checks.check("errors")
def _():
    expect_error(Exception, lambda: outlines.from_openai(client, ABSENT_MODEL)(CAPITAL, **FAIR), ABSENT_MODEL)
    expect_error(Exception, lambda: model(CAPITAL, temperature=-1), "temperature")


checks.client_lacks("tools", "embeddings")
