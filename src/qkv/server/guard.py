"""Who may ask, and how much: before any other code of the server sees a request.

A web page elsewhere must not drive a server on this machine. So a request with an `Origin` must come from the server's
own page or from one that was allowed, and a `Host` must be an address, a name without dots or one that is known: a name
that somebody else's DNS can point here is refused.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import secrets
import socket
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qkv.server.errors import ApiError, api_error, error_response
from qkv.server.metrics import Metrics
from qkv.server.settings import Settings

log = logging.getLogger("qkv.server")
KEYED = ("/v1/", "/tokenize", "/detokenize", "/metrics", "/openapi.json")
"""The others are /health and the page, which hold no secret."""


class Guard:
    """Checks a request's host, origin, key and size, gives it an id, and logs one line about it."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        own = socket.gethostname().lower()
        self._names = {settings.host.lower(), own, f"{own}.local", *(name.lower() for name in settings.hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        headers, path = Headers(scope=scope), scope["path"]
        given = headers.get("x-request-id", "")
        scope["qkv.id"] = given if re.fullmatch(r"[\w.-]{1,64}", given) else f"req_{secrets.token_hex(12)}"

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                out = MutableHeaders(scope=message)
                out["x-request-id"] = out["request-id"] = scope["qkv.id"]
                out["X-Content-Type-Options"] = "nosniff"
            await send(message)

        try:
            self._check(headers, path, scope["method"])
            await self._app(scope, self._limited(receive), tell)
        except Exception as error:
            if status:
                raise
            await error_response(api_error(error), path)(scope, receive, tell)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.replies.labels(route, str(status)).inc()
            seconds = time.perf_counter() - started
            shown = path.encode("unicode_escape").decode()[:80]
            log.info("%s %s %s %d %.3f s", scope["qkv.id"], scope["method"], shown, status, seconds)

    def _check(self, headers: Headers, path: str, method: str) -> None:
        host = headers.get("host", "")
        if not self._known(host):
            raise ApiError(f"Host: {host[:80]!r} is not a name of this server; see --allow-host", 403)
        origin = headers.get("origin")
        if origin is not None and origin not in self._settings.origins and urlsplit(origin).netloc != host:
            raise ApiError(f"Origin: {origin[:80]!r} may not use this server; see --allow-origin", 403)
        if self._settings.api_key is not None and path.startswith(KEYED) and not self._has_key(headers):
            raise ApiError("the API key is missing or wrong", 401, code="invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._settings.max_body:
            raise self._too_large()

    def _known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
            return True
        except ValueError:
            return bool(name) and ("." not in name or name in self._names or name.endswith((".localhost", ".internal")))

    def _has_key(self, headers: Headers) -> bool:
        key = (self._settings.api_key or "").encode()
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), bearer.strip() if scheme.lower() == "bearer" else ""]
        equal = [hmac.compare_digest(one.encode("latin-1"), key) for one in given]
        return any(equal)

    def _limited(self, receive: Receive) -> Receive:
        """Receive a body of limited size within limited time."""
        size, complete, deadline = 0, False, time.monotonic() + self._settings.body_seconds

        async def limited() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0.001, deadline - time.monotonic()))
            except (TimeoutError, asyncio.TimeoutError):
                raise ApiError("the body did not arrive in time", 408) from None
            size += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if size > self._settings.max_body:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> ApiError:
        return ApiError(f"the body has more than {self._settings.max_body} bytes; send less", 413)
