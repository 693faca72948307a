"""What a server refuses: the status, the shape and the field, before the first byte of a stream."""

from __future__ import annotations

import json
import threading

import pytest

from qkv.errors import QkvError
from server.serving import running
from test_llm_dictated import TOOL

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 20}
CHAT = "/v1/chat/completions"
BODIES = {
    CHAT: HELLO,
    "/v1/completions": {"prompt": "a", "max_tokens": 5},
    "/v1/responses": {"input": "a", "max_output_tokens": 5},
    "/v1/messages": {"messages": HELLO["messages"], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": HELLO["messages"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


def error_of(reply, path=CHAT):
    """The error's message and field, in the shape of the API."""
    body = reply.json()
    if path.startswith("/v1/messages"):
        assert set(body) == {"type", "error"}
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "\n" not in body["error"]["message"]
    assert reply.headers["x-request-id"]
    return body["error"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b"\xff\xfe{",
        b'{"a": "\\ud800"}',
        b'{"a": ' + b"[" * 100_000,
        b'{"messages": {"role": "user"}, "prompt": {}, "input": {}, "tokens": {}}',
        b'{"messages": "hi", "prompt": 5, "input": 5, "tokens": "a", "max_tokens": 5}',
    ],
)
def test_bodies_that_are_not_requests(server, path, body):
    reply = server.post(path, body)
    assert reply.status_code == 400
    error_of(reply, path)
    assert server.post(path, BODIES[path]).status_code == 200


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": 5, "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 1e400}, None),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 100}, "stop"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, "json_schema"),
        ({"regex": "("}, "regex"),
        ({"grammar": "start: missing"}, "grammar"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "template_variables"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ],
)
def test_fields_that_are_wrong_are_named(server, change, field):
    body = json.dumps(HELLO | change).replace("Infinity", "1e400")
    for stream in (False, True):
        reply = server.post(CHAT, json.dumps(json.loads(body) | {"stream": stream}).replace("Infinity", "1e400"))
        assert reply.status_code == 400, reply.text
        assert reply.headers["content-type"] == "application/json"
        error = error_of(reply)
        assert error["type"] == "invalid_request_error"
        if field is not None:
            assert (error["param"] or "").split("[")[0].split(".")[0] == field.split("[")[0].split(".")[0]
            assert field.split(".")[-1].split("[")[0] in error["message"]


@pytest.mark.parametrize("prompt", ["", [""], [[]], [], ["a", ""], [10**6], [[1, 10**6]], ["a", 5]])
def test_prompts_that_are_none(server, prompt):
    assert server.post("/v1/completions", {"prompt": prompt, "max_tokens": 2}).status_code == 400
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
def test_a_prompt_that_is_too_long(server, path):
    long = "x" * 3000
    field = next(name for name in ("messages", "prompt", "input") if name in BODIES[path])
    prompt = [{"role": "user", "content": long}] if field == "messages" else long
    reply = server.post(path, BODIES[path] | {field: prompt, "stream": True})
    error = error_of(reply, path)
    assert reply.status_code == 400
    assert "2000" in error["message"]
    assert "3" in error["message"]
    if path != "/v1/messages":
        assert error["code"] == "context_length_exceeded"


def test_paths_and_methods_that_are_not_there(server):
    assert error_of(server.get("/v1/nothing"))["type"] == "not_found_error"
    assert server.get(CHAT).status_code in (404, 405)
    assert server.post("/v1/models", {}).status_code == 405
    assert server.get("/v1/messages/nothing").json()["type"] == "error"


def test_a_strict_server_refuses_names_and_fields_that_it_does_not_know(llm):
    with running(llm, strict=True, aliases=["other"]) as server:
        assert error_of(server.post(CHAT, HELLO | {"model": "gpt-4o"}))["code"] == "model_not_found"
        assert server.post(CHAT, HELLO | {"model": "other"}).json()["model"] == "other"
        assert "num_ctx" in error_of(server.post(CHAT, HELLO | {"num_ctx": 5}))["message"]
        assert server.post("/v1/messages", BODIES["/v1/messages"] | {"model": "claude"}).status_code == 404
        assert [model["id"] for model in server.get("/v1/models").json()["data"]] == [server.service.id, "other"]


def test_a_full_queue_says_when_to_come_back(llm, says):
    release = threading.Event()
    with running(llm, max_waiting=1) as server, pytest.MonkeyPatch.context() as patch:
        step = llm._decoder.step
        patch.setattr(llm._decoder, "step", lambda *a, **k: (release.wait(30), step(*a, **k))[1])
        first = threading.Thread(target=server.post, args=(CHAT, HELLO))
        first.start()
        while not server.service.answerer.open:
            pass
        reply = server.post(CHAT, HELLO | {"stream": True})
        release.set()
        first.join()
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) > 0
        assert error_of(reply)["type"] == "rate_limit_error"
        assert server.post(CHAT, HELLO).status_code == 200


@pytest.mark.parametrize(
    ("path", "ends"),
    [
        (CHAT, lambda events: events[-1][1] == "[DONE]" and events[-2][1]["error"]["type"] == "server_error"),
        ("/v1/messages", lambda events: events[-1][0] == "error" and events[-1][1]["error"]["type"] == "api_error"),
        ("/v1/responses", lambda events: [name for name, _ in events[-2:]] == ["error", "response.failed"]),
    ],
)
def test_what_fails_in_a_stream_is_its_last_event(server, says, path, ends):
    """The third step fails; the client hears of it without the server's inside, and the next request works."""
    with says("Hello"), pytest.MonkeyPatch.context() as patch:
        step, steps = server.llm._decoder.step, []

        def fail(*args, **options):
            steps.append(1)
            if len(steps) == 3:
                raise QkvError("secret inside")
            return step(*args, **options)

        patch.setattr(server.llm._decoder, "step", fail)
        events = server.events(path, BODIES[path])
    assert ends(events)
    assert "secret" not in json.dumps(events)
    with says("Hello"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.llm._decoder, "step", lambda *args, **options: 1 / 0)
        reply = server.post(path, BODIES[path])
    assert reply.status_code == 500
    assert "Zero" not in reply.text
    assert server.post(path, BODIES[path]).status_code == 200
