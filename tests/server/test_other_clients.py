"""Other clients: bodies as they send them, the `llm` command line for real, and what schemathesis makes up."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASK = [{"role": "user", "content": "Hello"}]
LANGCHAIN = {
    "model": "qwen",
    "messages": [{"content": "Be short.", "role": "system"}, {"content": "Hello", "role": "user"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.0,
    "max_completion_tokens": 64,
    "n": 1,
    "seed": 1,
    "logprobs": False,
    "presence_penalty": 0.0,
    "parallel_tool_calls": False,
    "tools": [WEATHER],
    "tool_choice": "auto",
    "service_tier": "auto",
}
LITELLM = {
    "model": "qwen",
    "messages": ASK,
    "temperature": 0,
    "max_tokens": 64,
    "top_p": None,
    "user": "",
    "extra_body": {},
    "stop": None,
    "metadata": {"hidden": "x"},
}
PYDANTIC_AI = {
    "model": "qwen",
    "messages": [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"text": "Hi", "type": "text"}]},
    ],
    "temperature": 0,
    "n": 1,
    "parallel_tool_calls": True,
    "stream": False,
    "tool_choice": "auto",
    "tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}],
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "store": False,
    "prediction": None,
}
OPEN_WEBUI = {
    "stream": True,
    "model": "qwen",
    "messages": ASK,
    "temperature": 0,
    "top_p": 0.9,
    "max_tokens": 64,
    "frequency_penalty": 0,
    "seed": 0,
    "stop": ["###"],
    "chat_id": "1",
    "session_id": "s",
    "filter_ids": [],
    "background_tasks": {"title_generation": True},
}
VERCEL = {
    "model": "qwen",
    "user": "u",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    "max_tokens": 64,
    "temperature": 0,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"schema": {"type": "string"}, "strict": True, "name": "r"},
    },
    "reasoning_effort": "low",
    "verbosity": "low",
    "stream": True,
    "stream_options": {"include_usage": True},
}
INSTRUCTOR = {
    "model": "qwen",
    "messages": ASK,
    "temperature": 0,
    "max_tokens": 64,
    "response_format": {"type": "json_object", "schema": {"enum": ["x"]}},
}
CODEX = {
    "model": "qwen",
    "instructions": "You are Codex.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
            "encrypted_content": None,
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city":"Paris"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ],
    "tools": [
        {"type": "function", **WEATHER["function"], "strict": False},
        {"type": "web_search"},
        {"type": "custom", "name": "patch"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "low", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"},
    "temperature": 0,
    "max_output_tokens": 200,
}
CLAUDE_CODE = {
    "model": "claude-haiku-4-5",
    "max_tokens": 32000,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=12ab;"},
        {"type": "text", "text": "You are Claude Code. " * 10, "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}],
    "tools": [
        {"name": "weather", "description": "W.", "input_schema": WEATHER["function"]["parameters"]},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "metadata": {"user_id": "u"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": []},
    "temperature": 0,
}
BODIES = [
    (CHAT, LANGCHAIN),
    (CHAT, LITELLM),
    (CHAT, PYDANTIC_AI),
    (CHAT, OPEN_WEBUI),
    (CHAT, VERCEL),
    (CHAT, INSTRUCTOR),
    ("/v1/responses", CODEX),
    ("/v1/messages", CLAUDE_CODE),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_bodies_as_clients_send_them(server, says, path, body):
    headers = {
        "Authorization": "Bearer x",
        "x-api-key": "x",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "a,b",
    }
    with says('<think>hm</think>"ok"'):
        reply = server.post(path, body, headers=headers)
    assert reply.status_code == 200, reply.text
    assert "ok" in reply.text or '"x"' in reply.text.replace("\\", "")
    assert reply.headers["content-type"].startswith("text/event-stream" if body.get("stream") else "application/json")


def test_claude_codes_changing_line_does_not_change_the_prompt(server):
    def used(line: str) -> dict[str, int]:
        system = [{"type": "text", "text": f"x-anthropic-billing-header: {line}"}, *CLAUDE_CODE["system"][1:]]
        return server.post("/v1/messages", CLAUDE_CODE | {"system": system, "stream": False, "max_tokens": 4}).json()[
            "usage"
        ]

    first, second = used("cc_version=1; cch=0000;"), used("cc_version=2; cch=ffffffff;")
    assert sum(first[key] for key in ("input_tokens", "cache_read_input_tokens")) == sum(
        second[key] for key in ("input_tokens", "cache_read_input_tokens")
    )
    assert second["cache_read_input_tokens"] >= second["input_tokens"]


def test_tokens_there_and_back(server, llm):
    text = "Hello 東京 <|im_end|>"
    for field in ("prompt", "content"):
        counted = server.post("/tokenize", {field: text}).json()
        assert counted["tokens"] == llm.tokenizer.encode(text)
        assert counted["count"] == len(counted["tokens"])
    assert server.post("/detokenize", {"tokens": counted["tokens"]}).json()["content"] == text
    chat = server.post("/tokenize", {"messages": ASK}).json()
    answer = server.post(CHAT, {"messages": ASK, "max_tokens": 1}).json()
    assert chat["count"] == answer["usage"]["prompt_tokens"]
    assert server.post("/detokenize", {"tokens": [10**6]}).status_code == 400


@pytest.mark.oracle
def test_the_llm_command(server, says, tmp_path):
    pytest.importorskip("llm")
    settings = [{"model_id": "q", "model_name": "q", "api_base": f"{server.url}/v1", "supports_schema": True}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(settings))
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none", "LLM_LOAD_PLUGINS": ""}
    run = [sys.executable, "-m", "llm", "-m", "q", "-o", "temperature", "0"]
    for more, said, expected in [
        ([], "Hi 東京", "Hi 東京"),
        (["--no-stream"], "Hi 東京", "Hi 東京"),
        (["--schema", '{"enum": ["yes"]}'], "<think>hm</think>no", '"yes"'),
    ]:
        with says(said):
            done = subprocess.run([*run, *more, "Hello"], capture_output=True, text=True, env=environment, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == expected


@pytest.mark.oracle
@pytest.mark.slow
def test_nothing_that_is_made_up_breaks_the_server(llm):
    """Of schemathesis' checks these are left out. `positive_data_acceptance`: which conversations a model's template
    takes, and which schemas a grammar can hold, no JSON Schema can say. `unsupported_method`: paths belong to the page
    where they are no endpoint's."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, given, settings
    from schemathesis import checks

    from server.serving import running

    excluded = {"positive_data_acceptance", "unsupported_method"}
    chosen = [check for check in checks.CHECKS.get_all() if check.__name__ not in excluded]
    with running(llm) as server:
        schema = schemathesis.openapi.from_dict(server.app.openapi())
        schema.config.update(base_url=server.url)
        tried = 0
        for result in schema.get_all_operations():
            operation = result.ok()

            @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
            @given(case=operation.as_strategy())
            def attempt(case) -> None:
                reply = case.call(timeout=60)
                assert reply.status_code < 500
                case.validate_response(reply, checks=chosen)

            attempt()
            tried += 1
        assert tried >= 12
        assert server.post(CHAT, {"messages": ASK, "max_tokens": 2}).status_code == 200
