"""Routes of the models that the queue's workers serve: OpenAI's `/v1/models`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from producer.gateway.requests import gateway_of
from producer.gateway.workers import unknown_model

OWNER = "tokenmill"


async def list_models(request: Request) -> Response:
    """Answer the served names of all live workers."""
    names = await _names(request)
    return JSONResponse({"object": "list", "data": [_model(name) for name in names]})


async def get_model(request: Request) -> Response:
    """Answer one model; 404 if no live worker serves it."""
    name, names = request.path_params["model"], await _names(request)
    if name not in names:
        raise unknown_model(name, names)
    return JSONResponse(_model(name))


async def _names(request: Request) -> list[str]:
    gateway = gateway_of(request)
    gateway.require_redis()
    return await gateway.workers.models()


def _model(name: str) -> dict[str, Any]:
    """Return OpenAI's object of a model. Workers don't publish when a model was made: `created` is 0."""
    return {"id": name, "object": "model", "created": 0, "owned_by": OWNER}


ROUTES = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", get_model, methods=["GET"]),
]
