"""A server that says what a test tells it to: the page's own files, and the chat interface from a script."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import qkv

PAGE = Path(qkv.__file__).parent / "server" / "page"
FILES = [file.name for file in sorted(PAGE.iterdir())]
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@dataclass
class Script:
    """What the model says next, and all that was asked of it."""

    pieces: list[str] = field(default_factory=lambda: ["Hello", " there."])
    thoughts: list[str] = field(default_factory=list)
    gate: threading.Semaphore | None = None  # each piece waits for one release
    finish: str = "stop"
    status: int = 200  # else the request is refused
    message: str = "refused"
    fails_after: int | None = None  # an error event comes after so many pieces
    cut_after: int | None = None  # the connection closes after so many pieces
    key: str | None = None
    model_says: Any = None  # a function of the request's body that gives the pieces
    asked: list[dict[str, Any]] = field(default_factory=list)
    gone: threading.Event = field(default_factory=threading.Event)  # set once a client went away


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Script

    def log_message(self, *_: Any) -> None:
        pass

    def send(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        for name, value in (
            {"Content-Type": kind, "Content-Length": str(len(body)), "Connection": "close"} | headers
        ).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, message: str) -> None:
        error = {"message": message, "type": "error", "param": None, "code": None}
        self.send(status, json.dumps({"error": error}).encode(), Retry_After="7")

    def allowed(self) -> bool:
        return self.script.key in (None, (self.headers["Authorization"] or "").removeprefix("Bearer "))

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            if not self.allowed():
                return self.refuse(401, "no such key")
            models = [{"id": "scripted", "object": "model", "max_model_len": 32768}]
            return self.send(200, json.dumps({"object": "list", "data": models}).encode())
        file = PAGE / (self.path.removeprefix("/") or "index.html")
        if not file.is_file():
            return self.refuse(404, "no such page")
        return self.send(200, file.read_bytes(), TYPES[file.suffix])

    def do_POST(self) -> None:
        script = self.script
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        script.asked.append(body)
        if not self.allowed():
            return self.refuse(401, "no such key")
        if script.status != 200:
            return self.refuse(script.status, script.message)
        pieces = script.model_says(body) if script.model_says else script.pieces
        usage = {
            "prompt_tokens": 100,
            "completion_tokens": len(pieces),
            "prompt_tokens_details": {"cached_tokens": 75},
        }
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(pieces), "reasoning_content": "".join(script.thoughts)}
            choice = {"index": 0, "message": message, "finish_reason": script.finish}
            return self.send(200, json.dumps({"choices": [choice], "usage": usage}).encode())
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for event in self.events(pieces, usage):
                self.wfile.write(f"{event}\n\n".encode())
        except (BrokenPipeError, ConnectionResetError):
            script.gone.set()
        self.close_connection = True
        return None

    def events(self, pieces: list[str], usage: dict[str, Any]) -> Iterator[str]:
        script = self.script

        def chunk(delta: dict[str, str], finish: str | None = None) -> str:
            return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

        yield ": ping"
        yield chunk({"role": "assistant", "content": ""})
        for thought in script.thoughts:
            yield from self.waited()
            yield chunk({"reasoning_content": thought, "reasoning": thought})
        for i, piece in enumerate(pieces):
            if i == script.fails_after:
                yield "data: " + json.dumps({"error": {"message": "the model broke", "type": "server_error"}})
                return
            if i == script.cut_after:
                return
            yield from self.waited()
            yield chunk({"content": piece})
        yield chunk({}, script.finish)
        timings = {"predicted_per_second": 41.5}
        yield "data: " + json.dumps({"choices": [], "usage": usage, "timings": timings})
        yield "data: [DONE]"

    def waited(self) -> Iterator[str]:
        """Comments until the test lets the next piece go: a client that has gone away is noticed by them."""
        while self.script.gate and not self.script.gate.acquire(timeout=0.05):
            yield ": ping"


class PageServer:
    """The server on a free port; `script` is what it says."""

    def __init__(self) -> None:
        self.script = Script()
        handler = type("Scripted", (Handler,), {"script": self.script})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
