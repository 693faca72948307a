"""A server that really listens, in this process, around a model that says what it is told."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from qkv import LLM
from qkv.server.app import create_app
from qkv.server.connection import protocol
from qkv.server.settings import Settings


class Running:
    """A server at `url`; `service` is its inside."""

    def __init__(self, llm: LLM, settings: Settings) -> None:
        self.llm = llm
        self.app = app = create_app(llm, settings)
        self.service = app.state.service
        config = uvicorn.Config(app, http=protocol(settings.body_seconds), ws="none", log_config=None, access_log=False)
        self.server = uvicorn.Server(config)
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True)

    def start(self) -> None:
        self._thread.start()
        while not self.server.started:
            time.sleep(0.005)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        content = body if isinstance(body, (bytes, str)) else json.dumps(body)
        return httpx.post(self.url + path, content=content, timeout=60, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def events(self, path: str, body: dict[str, Any]) -> list[tuple[str | None, Any]]:
        """The events of a stream: (name, data); data that is not JSON stays text."""
        reply = self.post(path, body | {"stream": True})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        return parse(reply.content)

    def idle(self) -> bool:
        """Whether nothing runs any more, within a moment."""
        pool = self.llm._engine.scheduler.pool
        deadline = time.monotonic() + 20
        while (self.service.answerer.open or pool.free < pool.size) and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self.service.answerer.open and pool.free == pool.size


def parse(raw: bytes) -> list[tuple[str | None, Any]]:
    """Events, each of which must be whole UTF-8 and whole JSON by itself."""
    found: list[tuple[str | None, Any]] = []
    for block in raw.split(b"\n\n"):
        name, data = None, None
        for line in block.decode("utf-8").split("\n"):
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                data = line[6:]
        if data is not None:
            found.append((name, data if data == "[DONE]" else json.loads(data, parse_constant=refuse)))
    return found


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@contextmanager
def running(llm: LLM, **settings: Any) -> Iterator[Running]:
    server = Running(llm, Settings(**settings))
    server.start()
    try:
        yield server
        assert server.idle()
    finally:
        server.stop()
