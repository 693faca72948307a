"""What a server tells about itself: its model, its health, its metrics, its interface."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from qkv.server.service import Service, service_of

router = APIRouter()


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def models(request: Request) -> dict[str, Any]:
    """The model under each of its names."""
    service = service_of(request)
    listed = [_model(service, name) for name in service.names]
    return {"object": "list", "data": listed, "has_more": False, "first_id": service.id, "last_id": service.names[-1]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """One of them."""
    service = service_of(request)
    if name not in service.names:
        raise service.no_such_model(name)
    return _model(service, name)


@router.get("/health")
async def health(request: Request) -> Response:
    """Whether it can answer: 200 or 503."""
    healthy = service_of(request).answerer.healthy
    return JSONResponse({"status": "ok" if healthy else "unavailable"}, 200 if healthy else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Counters and histograms for Prometheus."""
    return Response(service_of(request).metrics.text(), media_type="text/plain; version=0.0.4")


def _model(service: Service, name: str) -> dict[str, Any]:
    llm = service.llm
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": service.started,
        "created_at": datetime.fromtimestamp(service.started, timezone.utc).isoformat(),
        "owned_by": "qkv",
        "max_model_len": llm.context,
        "capabilities": {"thinking": llm.can_think, "chat": llm.can_chat, "tools": llm.can_chat},
    }
