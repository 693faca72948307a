"""The server put together: its endpoints, its guard, and what happens when it starts and stops."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

import qkv
from qkv.errors import QkvError
from qkv.llm import LLM
from qkv.server import chat, completions, info, messages, responses, tokens
from qkv.server.errors import ApiError, api_error, error_response
from qkv.server.guard import Guard
from qkv.server.service import Service
from qkv.server.settings import Settings

PAGE = Path(__file__).parent / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""What the page may load: its own files and nothing else."""


def create_app(llm: LLM, settings: Settings | None = None) -> FastAPI:
    """The server of a model, as an ASGI application."""
    settings = settings or Settings()
    service = Service(llm, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.answerer.close()

    app = FastAPI(title="qkv", version=qkv.__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service, app.state.settings = service, settings
    for part in (chat, completions, responses, messages, tokens, info):
        app.include_router(part.router)
    app.mount("/", Page(directory=PAGE, html=True))
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(QkvError, _error)
    app.add_middleware(Guard, settings=settings, metrics=service.metrics)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.origins), allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return app


class Page(StaticFiles):
    """The chat page's files."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file; never one that is not part of the page, and never for a page elsewhere to frame."""
        response = await super().get_response(path, scope)
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cache-Control"] = "no-cache"
        return response


async def _http_error(request: Request, error: Exception) -> Response:
    """What the framework refuses: paths and methods that there are not."""
    assert isinstance(error, HTTPException)
    reply = error_response(ApiError(str(error.detail), error.status_code), request.url.path)
    reply.headers.update(error.headers or {})
    return reply


async def _error(request: Request, error: Exception) -> Response:
    return error_response(api_error(error), request.url.path)
