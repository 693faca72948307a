"""Who may ask: keys, hosts, origins, sizes; and what the log and the metrics say of it."""

from __future__ import annotations

import logging

import httpx
import pytest

from qkv.cli import serve
from qkv.cli.main import execute
from server.serving import running
from tinyllm import write_model

HELLO = {"messages": [{"role": "user", "content": "a secret wish"}], "max_tokens": 4, "temperature": 0}
CHAT = "/v1/chat/completions"


def test_a_key_opens_everything_but_health(llm):
    with running(llm, api_key="pässword") as server:
        key = "pässword".encode()
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            assert server.get(path).status_code == 401
            assert server.get(path, headers={"Authorization": b"Bearer " + key}).status_code == 200
        assert server.get("/health").status_code == 200
        for path in (CHAT, "/v1/messages", "/tokenize"):
            body = HELLO | {"prompt": None}
            for headers in (
                {},
                {"Authorization": b"Bearer wrong"},
                {"Authorization": key},
                {"Authorization": b"Bearer " + key + b"x"},
                {"x-api-key": b""},
            ):
                refused = server.post(path, body, headers=headers)
                assert refused.status_code == 401
                assert "error" in refused.json()
                assert "password" not in refused.text
            for headers in ({"Authorization": b"bearer " + key}, {"X-Api-Key": key}):
                assert server.post(path, body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:80", 200),
        ("192.168.1.7:8000", 200),
        ("qkv", 200),
        ("host.docker.internal", 200),
        ("chat.example.org", 200),
        ("evil.example.com", 403),
        ("localhost.evil.com", 403),
        ("127.0.0.1.evil.com", 403),
        ("", 403),
        ("[::1", 403),
    ],
)
def test_names_that_lead_here_by_somebody_elses_dns_are_refused(llm, host, status):
    with running(llm, hosts=["chat.example.org"]) as server:
        assert server.get("/v1/models", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "chrome-extension://abc"])
def test_a_page_elsewhere_cannot_use_it(server, origin):
    for reply in (
        server.get("/v1/models", headers={"Origin": origin}),
        server.post(CHAT, HELLO, headers={"Origin": origin, "Content-Type": "text/plain"}),
        httpx.options(server.url + CHAT, headers={"Origin": origin, "Access-Control-Request-Method": "POST"}),
    ):
        assert reply.status_code == 403
        assert "access-control-allow-origin" not in reply.headers


def test_the_own_page_and_allowed_pages_can(llm):
    allowed = "https://chat.example.org"
    with running(llm, origins=[allowed], api_key="k") as server:
        own = server.post(CHAT, HELLO, headers={"Origin": server.url, "X-Api-Key": "k"})
        assert own.status_code == 200
        asking = {
            "Origin": allowed,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        assert httpx.options(server.url + CHAT, headers=asking).headers["access-control-allow-origin"] == allowed
        other = server.post(CHAT, HELLO, headers={"Origin": allowed, "X-Api-Key": "k"})
        assert (other.status_code, other.headers["access-control-allow-origin"]) == (200, allowed)
        refused = server.post(CHAT, HELLO, headers={"Origin": "https://evil.example", "X-Api-Key": "k"})
        assert refused.status_code == 403


def test_bodies_have_a_limit_told_or_not(llm):
    with running(llm, max_body=2000) as server:
        large = b'{"messages": "' + b"x" * 3000 + b'"}'
        assert server.post(CHAT, large).status_code == 413
        in_pieces = httpx.post(server.url + CHAT, content=iter([large[:1500], large[1500:]]), timeout=30)
        assert in_pieces.status_code == 413
        assert in_pieces.json()["error"]["message"]
        assert server.post("/v1/messages", large).json()["error"]["type"] == "request_too_large"
        assert server.post(CHAT, HELLO).status_code == 200


def test_conversations_have_a_limit(server):
    messages = HELLO["messages"] * 4097
    assert server.post(CHAT, HELLO | {"messages": messages}).json()["error"]["param"] == "messages"
    assert server.post("/v1/messages", HELLO | {"messages": messages}).status_code == 400
    assert server.post("/v1/responses", {"input": messages}).status_code == 400


def test_a_request_that_takes_too_long_to_understand_is_given_up(llm, monkeypatch):
    import time

    encode = llm.tokenizer.encode
    monkeypatch.setattr(llm.tokenizer, "encode", lambda *a, **k: (time.sleep(1), encode(*a, **k))[1])
    with running(llm, prepare_seconds=0.2) as server:
        assert server.post(CHAT, HELLO).status_code == 503
        time.sleep(2)


def test_the_log_has_ids_and_no_prompts(llm, caplog):
    with caplog.at_level(logging.INFO), running(llm) as server:
        reply = server.post(CHAT, HELLO | {"no_such_field\n": 1}, headers={"X-Request-Id": "mine-1"})
        assert reply.headers["x-request-id"] == "mine-1"
        assert server.get("/health", headers={"X-Request-Id": "a b"}).headers["x-request-id"].startswith("req_")
        server.get("/v1/%1b[31m%0ared")
    lines = [record.getMessage() for record in caplog.records if record.name == "qkv.server"]
    assert any(line.startswith("mine-1 POST /v1/chat/completions 200") for line in lines)
    assert any("mine-1" in line and "no_such_field" in line for line in lines)
    assert "secret" not in "".join(lines)
    assert not any("\n" in line or "\x1b" in line for line in lines)
    with caplog.at_level(logging.INFO), running(llm, log_prompts=True) as server:
        server.post(CHAT, HELLO)
    assert "secret" in caplog.text


def test_health_and_metrics(llm, says):
    with running(llm) as server:
        before = llm.cache_stats
        with says("abc"):
            for stream in (False, True):
                server.post(CHAT, HELLO | {"stream": stream})
        server.post(CHAT, HELLO | {"n": 0})
        values = dict(line.rsplit(" ", 1) for line in server.get("/metrics").text.splitlines() if line[0] != "#")
        assert values['qkv_http_replies_total{path="/v1/chat/completions",status="200"}'] == "2.0"
        assert values['qkv_http_replies_total{path="/v1/chat/completions",status="400"}'] == "1.0"
        assert values['qkv_answers_total{outcome="answered"}'] == "2.0"
        assert values["qkv_generated_tokens_total"] == "6.0"
        assert values["qkv_time_to_first_token_seconds_count"] == "2.0"
        assert float(values["qkv_cache_queries_total"]) == before.queries + 2
        assert values["qkv_requests_open"] == values["qkv_answers_running"] == values["qkv_answers_waiting"] == "0.0"
        assert server.get("/health").json() == {"status": "ok"}
        server.service.answerer.stopping = True
        assert server.get("/health").status_code == 503
        assert server.post(CHAT, HELLO).status_code == 503
        server.service.answerer.stopping = False


def test_the_page_is_served_with_a_policy(server):
    page = server.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert server.get("/../app.py").status_code == 404
    assert server.get("/%2e%2e/app.py").status_code == 404
    assert server.get("/main.js").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (["--host", "0.0.0.0"], True),
        (["--host", "::"], True),
        (["--host", "0.0.0.0", "--api-key", "k"], False),
        (["--host", "127.0.0.2"], False),
        ([], False),
    ],
)
def test_who_lets_everyone_in_is_warned(tmp_path, monkeypatch, capsys, options, warned):
    folder = write_model(tmp_path / "tiny")
    monkeypatch.setattr(serve, "run", lambda *a, **k: None)
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    assert execute(["serve", "-q", "-m", str(folder), "--port", "0", "--weights", "f32", *options]) == 0
    assert ("anyone who reaches" in capsys.readouterr().err) is warned
