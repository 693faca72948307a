"""A real model held to schemas, choices, expressions and calls: SmolLM2, through the front door."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from qkv import LLM, SamplingParams
from qkv.errors import ParameterError

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "country": {"type": "string", "maxLength": 30},
        "population": {"type": "integer", "minimum": 0, "maximum": 10**8},
    },
    "required": ["city", "country", "population"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Describe the capital of France as JSON: city, country, population."}]
WEATHER = [{"type": "function", "function": {"name": "describe", "parameters": CITY}}]


@pytest.fixture(scope="module")
def llm(smollm2):
    with LLM(smollm2, threads=2, context=1024) as made:
        yield made


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_schema(llm, temperature):
    answers = [llm.chat(ASK, SamplingParams(json_schema=CITY, temperature=temperature, seed=seed)) for seed in (1, 2)]
    for answer in answers:
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), CITY)
    assert (answers[0].text == answers[1].text) == (temperature == 0)
    assert "Paris" in llm.chat(ASK, SamplingParams(json_schema=CITY, temperature=0)).text


def test_the_stream_and_the_batch_are_the_same(llm):
    params = SamplingParams(json_schema=CITY, temperature=1.0, seed=3)
    alone = llm.chat(ASK, params)
    stream = llm.stream_chat(ASK, params)
    assert "".join(chunk.text for chunk in stream) == alone.text
    prompt = llm.tokenizer.prompt("Paris as JSON: ")
    solo = [llm.generate(prompt, p) for p in (params, SamplingParams(regex="[a-z]{3,9}", temperature=0))]
    both = llm.generate([prompt, prompt], [params, SamplingParams(regex="[a-z]{3,9}", temperature=0)])
    assert [answer.token_ids for answer in both] == [answer.token_ids for answer in solo]
    assert re.fullmatch("[a-z]{3,9}", both[1].text)


def test_choices_and_grammars(llm):
    sky = [{"role": "user", "content": "Is the sky blue?"}]
    assert llm.chat(sky, SamplingParams(choices=["yes", "no"], temperature=0)).text in ("yes", "no")
    text = llm.chat(sky, SamplingParams(grammar='start: ("la" | "lu") ("-" ("la" | "lu")){2}', seed=1)).text
    assert re.fullmatch("l[au](-l[au]){2}", text)


def test_a_schema_that_cannot_be_kept_is_an_error_and_the_model_goes_on(llm):
    with pytest.raises(ParameterError, match=r"^json_schema: Unimplemented keys"):
        llm.chat(ASK, SamplingParams(json_schema={"not": {}}))
    assert llm.chat(ASK, SamplingParams(choices=["a"])).text == "a"


def test_a_call_that_has_to_be_made(llm):
    answer = llm.chat(ASK, SamplingParams(temperature=0, max_tokens=200), tools=WEATHER, tool_choice="required")
    assert answer.finish_reason == "tool_calls"
    assert answer.text == ""
    for call in answer.tool_calls:
        assert call.name == "describe"
        jsonschema.validate(json.loads(call.arguments), CITY)
