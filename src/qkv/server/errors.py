"""Every error a client can get: its status, and its body in the words of the API that was asked."""

from __future__ import annotations

import logging
import re
from typing import Any

from starlette.responses import JSONResponse

from qkv.errors import (
    ContextLengthError,
    ParameterError,
    QkvError,
    QueueFullError,
    RequestCancelledError,
    TemplateError,
)

log = logging.getLogger("qkv.server")
RETRY_SECONDS = 2
"""What a client is told to wait when the queue is full."""

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = _OPENAI_TYPES | {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


class ApiError(QkvError):
    """An error with a status. `param` is the field at fault, `code` a word for programs."""

    def __init__(self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    def openai(self) -> dict[str, Any]:
        """The body that OpenAI's clients read."""
        kind = _OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """The body that Anthropic's clients read."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def api_error(error: Exception) -> ApiError:
    """What a client is told of any exception. Of a defect it hears no details: they are logged."""
    if isinstance(error, ApiError):
        return error
    text = str(error)
    if isinstance(error, ContextLengthError):
        return ApiError(text, param="messages", code="context_length_exceeded")
    if isinstance(error, ParameterError):
        field = re.match(r"[a-z_]+(?:\.\w+|\[\d+\])*", text)
        return ApiError(text, param=field[0] if field else None, code="invalid_value")
    if isinstance(error, TemplateError):
        return ApiError(text, param="messages", code="invalid_value")
    if isinstance(error, QueueFullError):
        return ApiError(text, 429, code="rate_limit_exceeded")
    if isinstance(error, RequestCancelledError):
        return ApiError(text, 503, code="cancelled")
    log.error("a request failed: %s", error, exc_info=None if isinstance(error, QkvError) else error)
    return ApiError("the server failed; its log says why", 500, code="internal_error")


def error_response(error: ApiError, path: str) -> JSONResponse:
    """The reply to a request to `path`."""
    body = error.anthropic() if path.startswith("/v1/messages") else error.openai()
    headers = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(RETRY_SECONDS)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body, error.status, headers)
