"""The official `openai` and `anthropic` clients, used as their makers document them."""

from __future__ import annotations

import json
from typing import Literal

import pydantic
import pytest

from test_llm_dictated import CALL, TOOL

pytestmark = pytest.mark.oracle

GREEDY = {"temperature": 0}
ASK = [{"role": "user", "content": "Hello"}]
THOUGHT = "<think>\nhm\n</think>\n\n"
TOOL_RUN = "<think>hm</think>No!"


class Answer(pydantic.BaseModel):
    verdict: Literal["yes", "no"]


@pytest.fixture
def openai(server):
    module = pytest.importorskip("openai")
    return module.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def anthropic(server):
    module = pytest.importorskip("anthropic")
    return module.Anthropic(base_url=server.url, api_key="none", max_retries=0)


# ------------------------------------------------------------------------------------------ openai: chat


def test_chat_whole_and_streamed(openai, says):
    with says(THOUGHT + "Hi 東京"):
        whole = openai.chat.completions.create(model="x", messages=ASK, temperature=0)
        with openai.chat.completions.stream(
            model="x", messages=ASK, temperature=0, stream_options={"include_usage": True}
        ) as stream:
            deltas = [event.delta for event in stream if event.type == "content.delta"]
            final = stream.get_final_completion()
    assert whole.choices[0].message.content == "".join(deltas) == final.choices[0].message.content == "Hi 東京"
    assert whole.choices[0].message.reasoning_content == "hm"
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    assert final.usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens_details.cached_tokens


def test_a_pydantic_model_is_filled(openai, says):
    with says('<think>hm</think>{"verdict": "maybe"}'):
        parsed = openai.chat.completions.parse(model="x", messages=ASK, response_format=Answer, temperature=0)
    assert parsed.choices[0].message.parsed.verdict in ("yes", "no")


def test_a_tool_round_trip(openai, says):
    with says(TOOL_RUN):
        first = openai.chat.completions.create(
            model="x", messages=ASK, tools=[TOOL], tool_choice="required", temperature=0, max_tokens=300
        )
        with openai.chat.completions.stream(
            model="x",
            messages=ASK,
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "f"}},
            temperature=0,
        ) as stream:
            streamed = stream.get_final_completion()
    message = first.choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"k": 1}
    assert json.loads(streamed.choices[0].message.tool_calls[0].function.arguments) == {"k": 1}
    history = [*ASK, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}]
    with says("It is 2."):
        second = openai.chat.completions.create(model="x", messages=history, tools=[TOOL], temperature=0)
    assert second.choices[0].message.content == "It is 2."


def test_log_probabilities(openai, says):
    with says("Hi"):
        told = openai.chat.completions.create(model="x", messages=ASK, logprobs=True, top_logprobs=2, temperature=0)
    assert [token.token for token in told.choices[0].logprobs.content] == ["H", "i"]
    assert all(len(token.top_logprobs) == 2 for token in told.choices[0].logprobs.content)


def test_exception_classes(openai, server):
    import openai as module

    with pytest.raises(module.BadRequestError) as caught:
        openai.chat.completions.create(model="x", messages=ASK, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(module.BadRequestError) as caught:
        openai.chat.completions.create(model="x", messages=[{"role": "user", "content": "x" * 3000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(module.NotFoundError):
        openai.models.retrieve("no-such-model")


def test_models_and_completions(openai, server, says):
    (model,) = openai.models.list().data
    assert openai.models.retrieve(model.id).id == model.id == server.service.id
    with says("b c"):
        whole = openai.completions.create(model="x", prompt=["a", "b"], temperature=0, logprobs=2, echo=True)
        pieces = [
            chunk.choices[0] for chunk in openai.completions.create(model="x", prompt="a", temperature=0, stream=True)
        ]
    assert [(choice.index, choice.text) for choice in whole.choices] == [(0, "ab c"), (1, "bb c")]
    assert whole.choices[0].logprobs.tokens == ["a", "b", " ", "c"]
    assert whole.choices[0].logprobs.token_logprobs[0] is None
    assert whole.choices[0].logprobs.text_offset == [0, 1, 2, 3]
    assert "".join(piece.text for piece in pieces) == "b c"
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]


# ------------------------------------------------------------------------------------------ openai: responses


def test_responses_whole_and_streamed(openai, says):
    with says(THOUGHT + "Hi 東京"):
        whole = openai.responses.create(model="x", input="Hello", instructions="Be short.", temperature=0)
        with openai.responses.stream(model="x", input="Hello", instructions="Be short.", temperature=0) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
    assert whole.output_text == final.output_text == "Hi 東京"
    assert [item.type for item in whole.output] == [item.type for item in final.output] == ["reasoning", "message"]
    assert whole.output[0].content[0].text == "hm"
    assert whole.status == final.status == "completed"
    assert whole.usage.output_tokens == final.usage.output_tokens
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert {"response.output_text.done", "response.content_part.done", "response.output_item.done"} <= set(kinds)


def test_responses_tools_round_trip(openai, says):
    tool = {"type": "function", **TOOL["function"]}
    others = [tool, {"type": "web_search"}]  # what is not a function is left out
    with says(TOOL_RUN):
        first = openai.responses.create(
            model="x", input="Hello", tools=others, tool_choice="required", temperature=0, max_output_tokens=300
        )
        with openai.responses.stream(
            model="x", input="Hello", tools=[tool], tool_choice={"type": "function", "name": "f"}, temperature=0
        ) as stream:
            done = [event for event in stream if event.type == "response.function_call_arguments.done"]
    call = next(item for item in first.output if item.type == "function_call")
    assert json.loads(call.arguments) == json.loads(done[0].arguments) == {"k": 1}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    items = [{"role": "user", "content": "Hello"}, *first.output, output]
    with says("It is 2."):
        assert openai.responses.create(model="x", input=items, temperature=0).output_text == "It is 2."


def test_responses_fill_a_pydantic_model(openai, says):
    with says('<think>hm</think>{"verdict": "maybe"}'):
        parsed = openai.responses.parse(model="x", input="Hello", text_format=Answer, temperature=0)
    assert parsed.output_parsed.verdict in ("yes", "no")


def test_a_response_that_is_cut_off_says_so(openai, says):
    with says("Hello"):
        cut = openai.responses.create(model="x", input="Hello", temperature=0, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason, cut.output_text) == ("incomplete", "max_output_tokens", "He")


def test_responses_refuse_what_needs_a_memory(openai):
    import openai as module

    with pytest.raises(module.BadRequestError) as caught:
        openai.responses.create(model="x", input="Hello", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


# ------------------------------------------------------------------------------------------ anthropic


def test_messages_whole_and_streamed(anthropic, says):
    asked = {"model": "claude-haiku", "max_tokens": 200, "messages": ASK, "system": "Be short.", "extra_body": GREEDY}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    asked["max_tokens"] = 1500
    with says(THOUGHT + "Hi 東京"):
        whole = anthropic.messages.create(**asked)
        with anthropic.messages.stream(**asked) as stream:
            texts = list(stream.text_stream)
            final = stream.get_final_message()
    assert [block.type for block in whole.content] == [block.type for block in final.content] == ["thinking", "text"]
    assert whole.content[1].text == final.content[1].text == "".join(texts) == "Hi 東京"
    assert whole.content[0].thinking == final.content[0].thinking == "hm"
    assert whole.stop_reason == final.stop_reason == "end_turn"
    assert whole.model == "claude-haiku"
    assert final.usage.output_tokens == whole.usage.output_tokens
    total = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert total == final.usage.input_tokens + final.usage.cache_read_input_tokens
    counted = anthropic.messages.count_tokens(
        model="x", messages=ASK, system="Be short.", thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert counted.input_tokens == total


def test_messages_tell_which_stop_sequence_ended_them(anthropic, says):
    asked = {"model": "m", "max_tokens": 99, "messages": ASK, "stop_sequences": ["no", "lo"]}
    with says("Hello"):
        whole = anthropic.messages.create(**asked)
        with anthropic.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        ended = anthropic.messages.create(**asked | {"stop_sequences": ["no"]})
    for message in (whole, streamed):
        assert message.content[0].text == "Hel"
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "lo")
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)


def test_messages_tools_round_trip(anthropic, says):
    tool = {"name": "f", "description": "F.", "input_schema": TOOL["function"]["parameters"]}
    asked = {"model": "x", "max_tokens": 300, "messages": ASK, "tools": [tool], "extra_body": GREEDY}
    call = '<tool_call>\n{"name": "f", "arguments": {"k":1}}\n</tool_call>'
    with says(call):
        first = anthropic.messages.create(**asked, tool_choice={"type": "any"})
        with anthropic.messages.stream(**asked, tool_choice={"type": "tool", "name": "f"}) as stream:
            final = stream.get_final_message()
    (block,) = [block for block in first.content if block.type == "tool_use"]
    assert block.input == final.content[-1].input == {"k": 1}
    assert first.stop_reason == final.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "2"}]}
    history = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with says("It is 2."):
        second = anthropic.messages.create(**(asked | {"messages": history}))
    assert second.content[0].text == "It is 2."


def test_anthropic_exception_classes(anthropic, server):
    import anthropic as module

    with pytest.raises(module.BadRequestError, match="temperature"):
        anthropic.messages.create(model="x", max_tokens=5, messages=ASK, extra_body={"temperature": -1})
    with pytest.raises(module.BadRequestError, match="only blocks of text"):
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
        anthropic.messages.create(model="x", max_tokens=5, messages=[{"role": "user", "content": [image]}])
    assert anthropic.models.list().data[0].id == server.service.id


def test_calls_in_a_row_stay_apart(anthropic, says):
    tool = {"name": "f", "input_schema": {"type": "object"}}
    asked = {"model": "x", "max_tokens": 900, "messages": ASK, "tools": [tool], "extra_body": GREEDY}
    with says(f"I look.\n{CALL}\n{CALL}"):
        whole = anthropic.messages.create(**asked)
        with anthropic.messages.stream(**asked) as stream:
            final = stream.get_final_message()
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
    assert [block.model_dump(exclude={"id"}) for block in final.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
