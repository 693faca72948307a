"""Sending an answer: as server-sent events or whole, and stopping the work when the client has gone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qkv.server.answering import Answer
from qkv.server.errors import ApiError, api_error

T = TypeVar("T")
COMMENT = ": ping\n\n"
"""What every client skips."""
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # no proxy may hold events back


def event(data: Any, name: str | None = None) -> str:
    """One event. Its JSON is on one line and whole: no character is ever split between two events."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


class EventStream(Response):
    """Sends `events`, and `ping` whenever there is none for a while.

    When the client goes, and when all is sent, the answer is closed. What fails on the way becomes the events of
    `failure`, and the stream ends.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: Answer,
        events: AsyncIterator[str],
        failure: Callable[[ApiError], str],
        *,
        ping: str = COMMENT,
        ping_seconds: float,
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._answer, self._events, self._failure = answer, events, failure
        self._ping, self._ping_seconds = ping, ping_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await unless_gone(receive, self._send(send))
        finally:
            self._answer.close()

    async def _send(self, send: Send) -> None:
        said = time.monotonic()

        async def say(text: str, more: bool = True) -> None:
            nonlocal said
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
            said = time.monotonic()

        async def ping() -> None:
            while True:
                silent = time.monotonic() - said
                await (say(self._ping) if silent >= self._ping_seconds else asyncio.sleep(self._ping_seconds - silent))

        pinging = asyncio.create_task(ping())
        last = ""
        try:
            async for text in self._events:
                await say(text)
        except Exception as error:
            last = self._failure(api_error(error))
        finally:
            pinging.cancel()
        await say(last, more=False)


async def whole(request: Request, answer: Answer, make: Callable[[], Awaitable[Any]]) -> Response:
    """The answer as one JSON body."""
    try:
        body = await unless_gone(request.receive, make())
    finally:
        answer.close()
    if body is None:
        return Response(status_code=499)  # nobody reads it
    return Response(json.dumps(body, ensure_ascii=False, allow_nan=False), media_type="application/json")


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
