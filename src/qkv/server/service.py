"""What the endpoints of one server share: the model, its names, the settings, and how requests are described."""

from __future__ import annotations

import hashlib
import time
from pathlib import PurePath
from typing import Any

from fastapi import Request
from pydantic import BaseModel

import qkv
from qkv.llm import LLM
from qkv.server.answering import Answerer
from qkv.server.errors import ApiError
from qkv.server.metrics import Metrics
from qkv.server.settings import Settings


class Service:
    """One model behind one address."""

    def __init__(self, llm: LLM, settings: Settings) -> None:
        self.llm, self.settings = llm, settings
        self.metrics = Metrics()
        self.answerer = Answerer(llm, settings, self.metrics)
        self.metrics.watch(lambda: self.answerer.open, llm.stats)
        self.started = int(time.time())
        self.id = model_id(llm.name)
        self.names = [self.id, *settings.aliases]
        made_of = f"{qkv.__version__} {llm.name} {llm.cache} {llm.load_report.packed}"
        self.fingerprint = f"qkv_{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"

    def model_name(self, asked: str | None) -> str:
        """The name to reply with. An unknown one gets the model that is there, unless the server is strict."""
        if asked in (None, "", *self.names):
            return asked or self.id
        if self.settings.strict:
            raise self.no_such_model(asked or "")
        return self.id

    def no_such_model(self, name: str) -> ApiError:
        """The error of a name that is not served."""
        return ApiError(
            f"model: {name[:80]!r} is not served here; ask for {self.id!r}", 404, param="model", code="model_not_found"
        )


def model_id(name: str) -> str:
    """A hub id stays as it is; of a path only the last part is told."""
    path = PurePath(name)
    hub_id = name.count("/") == 1 and not path.is_absolute() and path.suffix != ".gguf" and not name.startswith(".")
    return name if hub_id else path.name.removesuffix(".gguf") or "model"


def service_of(request: Request) -> Service:
    """The service that a request came to."""
    service: Service = request.app.state.service
    return service


def described(kind: type[BaseModel]) -> dict[str, Any]:
    """What /openapi.json says of an endpoint whose body is of this kind."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}
