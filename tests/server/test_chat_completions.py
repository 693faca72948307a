"""/v1/chat/completions on the wire, whole and streamed, with a model that says what it is told."""

from __future__ import annotations

import json

import pytest

from test_llm_dictated import CALL, TOOL

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 300}
PATH = "/v1/chat/completions"
EMOJI = "a 😀 東京 é"


def put_together(events):
    """What a client makes of a stream: its messages, finish reasons, usage."""
    assert events[-1] == (None, "[DONE]")
    chunks = [data for _, data in events[:-1]]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["system_fingerprint"]) for chunk in chunks}) == 1
    messages, reasons, usage = {}, {}, None
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        usage = chunk.get("usage", usage)
        for choice in chunk["choices"]:
            delta, index = choice["delta"], choice["index"]
            assert None not in delta.values()
            assert index not in reasons, "nothing comes after a finish reason"
            if index not in messages:
                assert delta.pop("role") == "assistant"
                messages[index] = {"content": "", "reasoning_content": "", "tool_calls": {}, "logprobs": []}
            message = messages[index]
            assert "role" not in delta
            message["content"] += delta.get("content", "")
            message["reasoning_content"] += delta.get("reasoning_content", "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"][call["index"]] = {
                        "id": call["id"],
                        "name": call["function"]["name"],
                        "arguments": "",
                    }
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            message["logprobs"] += (choice["logprobs"] or {}).get("content") or []
            if choice["finish_reason"] is not None:
                reasons[index] = choice["finish_reason"]
    assert set(reasons) == set(messages)
    return messages, reasons, usage


def both_ways(server, body):
    """The whole reply's choices, which the stream must add up to."""
    reply = server.post(PATH, body)
    assert reply.status_code == 200, reply.text
    whole = reply.json()
    messages, reasons, usage = put_together(server.events(PATH, body | {"stream_options": {"include_usage": True}}))
    assert [choice["index"] for choice in whole["choices"]] == sorted(messages) == list(range(body.get("n", 1)))
    for choice in whole["choices"]:
        streamed, message = messages[choice["index"]], choice["message"]
        assert streamed["content"] == (message["content"] or "")
        assert streamed["reasoning_content"] == message.get("reasoning_content", "")
        assert reasons[choice["index"]] == choice["finish_reason"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        assert [(call["name"], call["arguments"]) for call in streamed["tool_calls"].values()] == calls
        assert streamed["logprobs"] == (choice["logprobs"] or {"content": []})["content"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details"):
        assert usage[name] == whole["usage"][name]
    return whole["choices"], whole


def test_a_text_comes_whole_and_in_pieces(server, says):
    with says(EMOJI):
        (choice,), whole = both_ways(server, HELLO)
    assert choice["message"]["content"] == EMOJI
    assert choice["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == len(EMOJI.encode())
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + whole["usage"]["completion_tokens"]
    assert whole["timings"]["prompt_n"] + whole["timings"]["cache_n"] == whole["usage"]["prompt_tokens"]


def test_the_second_time_the_prompt_is_cached(server, says):
    body = HELLO | {"messages": [{"role": "user", "content": "cached? " * 20}]}
    with says("yes"):
        first, second = (server.post(PATH, body).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == (second["prompt_tokens"] - 1) // 32 * 32


def test_thinking_has_its_own_field_and_is_counted(server, says):
    with says("<think>\nhm\n</think>\n\nHello"):
        (choice,), whole = both_ways(server, HELLO)
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("hm", "Hello")
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("<\nhm\n>")


@pytest.mark.parametrize("switch", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}])
def test_thinking_is_turned_off(server, says, switch):
    with says("Hello"):
        plain, off = (server.post(PATH, HELLO | more).json()["usage"]["prompt_tokens"] for more in ({}, switch))
        (choice,), _ = both_ways(server, HELLO | switch)
    assert off == plain + len("<\n\n>\n\n")
    assert "reasoning_content" not in choice["message"]


@pytest.mark.parametrize("thought", ["", "<think>hm</think>"])
def test_calls_are_numbered_from_zero_whatever_came_before(server, says, thought):
    with says(f"{thought}{CALL}\n{CALL}"):
        (choice,), _ = both_ways(server, HELLO | {"tools": [TOOL]})
        (single,), _ = both_ways(server, HELLO | {"tools": [TOOL], "parallel_tool_calls": False})
    assert choice["finish_reason"] == single["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f", "f"]
    assert len(single["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_tool_choice_is_enforced(server, says, choice):
    with says("<think>hm</think>No!"):
        (answer,), _ = both_ways(server, HELLO | {"tools": [TOOL], "tool_choice": choice})
    assert json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"]) == {"k": 1}
    with says(CALL):
        (none,), _ = both_ways(server, HELLO | {"tools": [TOOL], "tool_choice": "none"})
    assert none["message"]["content"] == CALL


def test_the_old_names_of_tools(server, says):
    body = HELLO | {"functions": [TOOL["function"]], "function_call": {"name": "f"}}
    with says("<think>hm</think>No!"):
        choice = server.post(PATH, body).json()["choices"][0]
        chunks = [data["choices"][0] for _, data in server.events(PATH, body)[:-1]]
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == "function_call"
    arguments = "".join(chunk["delta"].get("function_call", {}).get("arguments", "") for chunk in chunks)
    assert json.loads(choice["message"]["function_call"]["arguments"]) == json.loads(arguments) == {"k": 1}


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", [1]]}, "strict": True}},
        {"type": "json_object", "schema": {"enum": ["yes", [1]]}},
    ],
)
def test_a_schema_is_enforced(server, says, form):
    with says("<think>hm</think>no JSON"):
        (choice,), _ = both_ways(server, HELLO | {"response_format": form})
    assert json.loads(choice["message"]["content"]) in ("yes", [1])
    assert choice["message"]["reasoning_content"] == "hm"


def test_log_probabilities_are_finite_and_one_for_each_token(server, says):
    body = HELLO | {"logprobs": True, "top_logprobs": 3, "logit_bias": {"7": -100}, "stop": ["😀"], "temperature": 0.01}
    with says("<think>hm</think>" + EMOJI):
        (choice,), whole = both_ways(server, body)
    told = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "a "
    assert len(told) == whole["usage"]["completion_tokens"]
    assert b"".join(bytes(one["bytes"]) for one in told).decode() == "<think>hm</think>a 😀"
    assert all(len(one["top_logprobs"]) == 3 and one["logprob"] <= 0 for one in told)


def test_several_choices_differ_and_are_repeatable(server):
    body = HELLO | {"n": 3, "seed": 1, "temperature": 1.5, "max_tokens": 12}
    choices, _ = both_ways(server, body)
    texts = [choice["message"]["content"] for choice in choices]
    assert len(set(texts)) == 3
    assert texts == [choice["message"]["content"] for choice in server.post(PATH, body).json()["choices"]]


def test_usage_and_timings_are_in_the_last_chunk_only(server, says):
    with says("ab"):
        plain = [data for _, data in server.events(PATH, HELLO)[:-1]]
        counted = [data for _, data in server.events(PATH, HELLO | {"stream_options": {"include_usage": True}})[:-1]]
    assert not any("usage" in chunk for chunk in plain)
    assert ["timings" in chunk for chunk in plain] == [False] * (len(plain) - 1) + [True]
    assert ["usage" in chunk for chunk in counted] == [False] * (len(counted) - 1) + [True]
    assert counted[-1]["choices"] == []


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "a"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}, {"role": "user", "content": "b"}],
        [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "2"},
        ],
    ],
)
def test_messages_as_clients_send_them(server, says, messages):
    with says("ok"):
        assert server.post(PATH, HELLO | {"messages": messages}).json()["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize(
    "more",
    [
        {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "verbosity": "low"},
        {"prediction": {"type": "content", "content": "x"}, "prompt_cache_key": "k", "safety_identifier": "s"},
        {"modalities": ["text"], "audio": None, "web_search_options": None},
        {"no_such_field": {"deep": [1]}, "num_ctx": 4096},
        dict.fromkeys(("temperature", "stop", "tools", "n", "seed", "logit_bias", "response_format")),
        {"max_tokens": 10**18, "max_completion_tokens": 2},
        {"max_tokens": 300.0, "seed": 5.0},
        {"model": "gpt-4o"},
    ],
)
def test_what_makes_no_difference_is_accepted(server, says, more):
    with says("ok"):
        reply = server.post(PATH, HELLO | more)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == "ok"
    assert reply.json()["model"] == server.service.id


def test_the_newer_name_of_max_tokens_wins(server, says):
    with says("Hello"):
        choice = server.post(PATH, HELLO | {"max_tokens": 4, "max_completion_tokens": 2}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("He", "length")
