"""SmolLM2 behind the server: the promise over HTTP, a short soak, and the command itself."""

from __future__ import annotations

import json

import pytest

from qkv import LLM
from qkv.cli.main import execute
from server.serving import running
from server.soak import soak

pytestmark = pytest.mark.slow
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def smol(smollm2):
    with LLM(smollm2, context=2048, cache_bytes=64 << 20) as llm:
        yield llm


def test_verify_finds_one_hash(smol, capsys):
    with running(smol) as server:
        assert execute(["verify", "--url", server.url, "--max-tokens", "24"]) == 0
        lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit(" ", 1)[0].strip() for line in lines[:4]] == ["alone", "cached", "streamed", "among 8"]
    assert len({line.rsplit(" ", 1)[1] for line in lines[:4]}) == 1
    assert lines[4] == "All the same."


def test_verify_finds_a_difference(smol, capsys, monkeypatch):
    """A server that answers differently when its cache helps is found out."""
    from qkv.server import chat

    whole = chat.ChatReply.whole

    async def changed(self):
        body = await whole(self)
        if body["usage"]["prompt_tokens_details"]["cached_tokens"]:
            body["choices"][0]["logprobs"]["content"][-1]["logprob"] += 1e-9
        return body

    monkeypatch.setattr(chat.ChatReply, "whole", changed)
    with running(smol) as server:
        assert execute(["verify", "--url", server.url, "--max-tokens", "4"]) == 1
    assert "differ" in capsys.readouterr().out


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "ftp://x", "http://"])
def test_verify_without_a_server(capsys, url):
    assert execute(["verify", "--url", url]) == 2
    assert capsys.readouterr().err.startswith("qkv: ")


def test_the_server_says_what_the_library_says(smol):
    messages = [{"role": "user", "content": "Name the capital of France."}]
    with running(smol) as server:
        reply = server.post(CHAT, {"messages": messages, "seed": 5, "max_tokens": 24}).json()
    from qkv import SamplingParams

    alone = smol.chat(messages, SamplingParams(seed=5, max_tokens=24))
    assert reply["choices"][0]["message"]["content"] == alone.text
    assert reply["usage"]["completion_tokens"] == len(alone.token_ids)
    json.dumps(reply, allow_nan=False)


def test_a_short_soak(smol):
    soak(smol, clients=16, seconds=10)
