"""Clients that go away, and servers that are stopped: the work ends soon, nothing leaks, the others notice nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial

import httpx
import pytest

from server.serving import parse, running
from tinyllm import write_model

CHAT = "/v1/chat/completions"
ENDLESS = {"temperature": 0, "max_tokens": 1900, "ignore_eos": True}
HELLO = ENDLESS | {"messages": [{"role": "user", "content": "Hello"}]}
APIS = {
    CHAT: HELLO,
    "/v1/completions": ENDLESS | {"prompt": "a"},
    "/v1/responses": {"input": "a", "max_output_tokens": 1900, "temperature": 0},
    "/v1/messages": {"messages": HELLO["messages"], "max_tokens": 1900, "temperature": 0},
}


def sent(server, path, body) -> socket.socket:
    """A connection on which the request has been sent, and nothing been read."""
    raw = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


@pytest.fixture
def steps(llm, monkeypatch):
    """Counts the model's steps, each of which takes a moment: an answer to its end would be seen."""
    made, step = [], llm._decoder.step

    def count(*args, **options):
        made.append(1)
        time.sleep(0.005)
        return step(*args, **options)

    monkeypatch.setattr(llm._decoder, "step", count)
    return made


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [True, False])
def test_work_stops_when_its_client_goes(server, steps, path, stream):
    connection = sent(server, path, APIS[path] | {"stream": stream})
    while len(steps) < 5:
        time.sleep(0.002)
    if stream:
        assert connection.recv(1)
    connection.close()
    assert server.idle()
    assert len(steps) < 300


def test_work_stops_in_a_queue_and_in_a_prompt(server, steps):
    """The first answer runs, the others wait or are being read; all go, in every order."""
    long = HELLO | {"messages": [{"role": "user", "content": "long " * 300}]}
    for order in (1, -1):
        connections = [sent(server, CHAT, body) for body in [HELLO, long, long | {"n": 3}, HELLO]]
        while server.service.answerer.open < 4:
            time.sleep(0.002)
        for connection in connections[::order]:
            connection.close()
        assert server.idle()


def test_many_streams_half_of_them_left(server, llm):
    """Those that stay get what they would get alone."""
    bodies = [
        {"messages": [{"role": "user", "content": f"Number {n}"}], "seed": n, "temperature": 1.2, "max_tokens": 40}
        for n in range(50)
    ]
    texts: dict[int, str] = {}

    def stay(n: int) -> None:
        events = server.events(CHAT, bodies[n])
        texts[n] = "".join(data["choices"][0]["delta"].get("content", "") for _, data in events[:-1])

    threads = [threading.Thread(target=stay, args=(n,)) for n in range(0, 50, 2)]
    leaving = []
    for n, thread in enumerate(threads):
        thread.start()
        leaving.append(sent(server, CHAT, bodies[2 * n + 1] | {"stream": True}))
    for n, connection in enumerate(leaving):
        if n % 2:
            connection.recv(100)
        connection.close()
    for thread in threads:
        thread.join(timeout=60)
    assert server.idle()
    for n, text in texts.items():
        assert text == server.post(CHAT, bodies[n]).json()["choices"][0]["message"]["content"]
    assert len(texts) == 25


def test_a_silent_stream_has_pings(llm):
    """While a prompt takes long, something comes; clients skip it."""
    with running(llm, ping_seconds=0.05) as server, pytest.MonkeyPatch.context() as patch:
        step = llm._decoder.step
        patch.setattr(llm._decoder, "step", lambda *a, **k: (time.sleep(0.3), step(*a, **k))[1])
        for path, ping in [(CHAT, b": ping\n\n"), ("/v1/messages", b'event: ping\ndata: {"type":"ping"}\n\n')]:
            body = {"messages": HELLO["messages"], "max_tokens": 2, "stream": True}
            raw = server.post(path, body).content
            assert raw.count(ping) >= 2
            assert parse(raw)


def test_half_requests_harm_nobody(llm):
    with running(llm, body_seconds=0.5) as server:

        def raw(text: bytes) -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
            connection.sendall(text)
            return connection

        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        half = [
            raw(b"POST /v1/chat"),
            raw(head),
            raw(head + b"Content-Length: 1000\r\n\r\n{"),
            raw(head + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"),
        ]
        assert half[2].recv(100).startswith(b"HTTP/1.1 408")
        for no_head in half[:2]:
            assert no_head.recv(100) == b"", "closed"
        for bad in [
            b"\x00\x01\x02\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            head + b"Content-Length: abc\r\n\r\n",
            head + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
            head + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
        ]:
            connection = raw(bad)
            assert connection.recv(100).startswith(b"HTTP/1.1 4")
            connection.close()
        endless = raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: ")
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                endless.sendall(b"x" * 16_000)
                time.sleep(0.001)
        assert server.get("/health").status_code == 200
        for connection in half:
            connection.close()


def test_connections_without_a_request_are_closed_and_no_others(llm):
    """Also where a request came before; one that is answered for longer keeps its connection."""
    with running(llm, body_seconds=0.3) as server, pytest.MonkeyPatch.context() as patch:
        whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for sent, answered in [(b"", False), (whole, True), (whole + whole[:20], True)]:
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
                connection.sendall(sent)
                received = b"".join(iter(partial(connection.recv, 1000), b""))  # until it is closed
                assert received.startswith(b"HTTP/1.1 200") is answered
        step = llm._decoder.step
        patch.setattr(llm._decoder, "step", lambda *a, **k: (time.sleep(0.5), step(*a, **k))[1])
        assert server.post(CHAT, HELLO | {"max_tokens": 3}).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("grace", "complete"), [("30", True), ("0.2", False)])
def test_a_stopped_server_lets_answers_end_and_exits_with_0(tmp_path, number, grace, complete):
    folder = write_model(tmp_path / "tiny")
    environment = {**os.environ, "QKV_OFFLINE": "1"}
    command = [sys.executable, "-m", "qkv", "serve", "-m", str(folder), "--port", "0", "--weights", "f32"]
    process = subprocess.Popen([*command, "--stop-seconds", grace], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        url = next(word for line in process.stderr for word in line.split() if word.startswith("http://127.0.0.1:"))
        url = url.removesuffix("/,").removesuffix("/")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        body = HELLO | {"stream": True, "max_tokens": 1500 if complete else None, "n": 1 if complete else 16}
        with httpx.stream("POST", url + CHAT, json=body, timeout=60) as reply:
            pieces = reply.iter_raw()
            first = next(pieces)
            process.send_signal(number)
            with pytest.raises(httpx.ConnectError):
                deadline = time.monotonic() + 20
                while time.monotonic() < deadline:
                    # A connection that the kernel had queued when the server stopped listening is closed unanswered.
                    with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                        httpx.get(f"{url}/health", timeout=5)
            events = parse(first + b"".join(pieces))
        assert events[-1] == (None, "[DONE]")
        assert ("error" in events[-2][1]) is not complete
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()


def test_a_server_learns_what_grammars_need_when_it_starts(llm, monkeypatch):
    called = threading.Event()
    monkeypatch.setattr(llm, "prepare_grammars", called.set)
    with running(llm):
        assert called.wait(20)
