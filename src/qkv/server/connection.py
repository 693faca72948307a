"""Connections that bring no request."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle


def protocol(seconds: float) -> type[H11Protocol]:
    """Uvicorn's HTTP/1.1, which closes connections that bring no whole head of a request for so long."""

    class Protocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.loop.call_later(seconds, self._close_unless_used, None)

        def _close_unless_used(self, last: RequestResponseCycle | None) -> None:
            if self.cycle is last and (last is None or last.response_complete):
                self.transport.close()
            if not self.transport.is_closing():
                self.loop.call_later(seconds, self._close_unless_used, self.cycle)

    return Protocol
