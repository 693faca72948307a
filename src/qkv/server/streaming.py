"""Sending an answer: as server-sent events or whole, and stopping the work when the client has gone."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qkv.server.answering import Answer
from qkv.server.errors import ApiError, api_error
from qkv.server.service import Service

T = TypeVar("T")
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # no proxy may hold events back


def event(data: Any, name: str | None = None) -> str:
    """One event. Its JSON is on one line and whole: no character is ever split between two events."""
    text = _JSON.encode(data)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


class Reply(ABC):
    """An answer in the words of one API."""

    PING = ": ping\n\n"
    """What a stream says when it is silent: every client skips a comment."""

    def __init__(self, service: Service, answer: Answer) -> None:
        self.service, self.answer = service, answer

    @abstractmethod
    async def whole(self) -> dict[str, Any]:
        """The body of a reply that is not a stream."""

    @abstractmethod
    def events(self) -> AsyncIterator[str]:
        """The events of a stream."""

    @abstractmethod
    def failure(self, error: ApiError) -> str:
        """The events by which a stream tells that it cannot go on."""

    async def response(self, request: Request, stream: bool | None) -> Response:
        """The reply, as a stream or whole. When the client has gone, and when all is sent, the answer is closed."""
        if stream:
            return EventStream(self)
        try:
            body = await unless_gone(request.receive, self.whole())
        finally:
            self.answer.close()
        if body is None:
            return Response(status_code=499)  # nobody reads it
        return Response(_JSON.encode(body), media_type="application/json")


class EventStream(Response):
    """Sends a reply's events, and pings whenever there is none for a while. What fails becomes its last event."""

    media_type = "text/event-stream"

    def __init__(self, reply: Reply) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await unless_gone(receive, self._send(send))
        finally:
            self._reply.answer.close()

    async def _send(self, send: Send) -> None:
        said, most = time.monotonic(), self._reply.service.settings.ping_seconds

        async def say(text: str, more: bool = True) -> None:
            nonlocal said
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
            said = time.monotonic()

        async def ping() -> None:
            while True:
                silent = time.monotonic() - said
                await (say(self._reply.PING) if silent >= most else asyncio.sleep(most - silent))

        pinging, last = asyncio.create_task(ping()), ""
        try:
            async for text in self._reply.events():
                await say(text)
        except Exception as error:
            last = self._reply.failure(api_error(error))
        finally:
            pinging.cancel()
        await say(last, more=False)


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T | None:
    """The result of `work`; None if the client goes before."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
