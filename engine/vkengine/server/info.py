"""The routes that generate nothing: models, settings, health, metrics, tokens."""

from __future__ import annotations

import asyncio
from importlib.metadata import version as package_version
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, PlainTextResponse, Response

from .app import Service, read_body
from .errors import ApiError
from .protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse,
)

if TYPE_CHECKING:
    from starlette.requests import Request

    from vkengine.tokenizer import Tokenizer


LONG_TEXT = 16_384  # characters; some milliseconds


def service_of(request: Request) -> Service:
    return request.app.state.service


def check_model(service: Service, name: str | None) -> None:
    """None means the one model served here."""
    if name is not None and name != service.engine.model_name:
        raise ApiError(
            404,
            f"model '{name[:128]}' is not served here; '{service.engine.model_name}' is",
            param="model",
        )


def tokenizer_of(service: Service, field: str) -> Tokenizer:
    if service.tokenizer is None:
        raise ApiError(
            400, f"{field}: this server has no tokenizer; send token ids as prompt", param=field
        )
    return service.tokenizer


async def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Long texts are encoded beside the event loop, so that streams do not wait for them."""
    if len(text) < LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


def _card(service: Service) -> dict[str, Any]:
    name = service.engine.model_name
    return {
        "id": name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "vk",
        "root": name,
        "parent": None,
        "max_model_len": service.engine.max_model_len,
    }


async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_card(service_of(request))]})


async def model(request: Request) -> Response:
    service = service_of(request)
    check_model(service, request.path_params["name"])
    return JSONResponse(_card(service))


async def settings(request: Request) -> Response:
    service = service_of(request)
    # No profile keeps a prompt's state for another prompt: every one is computed in full.
    found = {**service.engine.settings(), "prefix_caching": False}
    return JSONResponse({**found, **service.settings})


async def health(request: Request) -> Response:
    failed = service_of(request).driver.failure is not None
    return Response(status_code=503 if failed else 200)


async def version(_: Request) -> Response:
    return JSONResponse({"version": package_version("vkengine")})


async def load(request: Request) -> Response:
    driver = service_of(request).driver
    return JSONResponse({"server_load": driver.running + driver.waiting})


async def metrics(request: Request) -> Response:
    service = service_of(request)
    return PlainTextResponse(
        service.metrics.render(service.driver),
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )


async def tokenize(request: Request) -> Response:
    service = service_of(request)
    body = parse(TokenizeBody, await read_body(request, service.limits))
    check_model(service, body.model)
    tokenizer = tokenizer_of(service, "prompt")
    tokens = await encode(tokenizer, body.prompt, body.add_special_tokens)
    return JSONResponse(
        {"tokens": tokens, "count": len(tokens), "max_model_len": service.engine.max_model_len}
    )


async def detokenize(request: Request) -> Response:
    service = service_of(request)
    body = parse(DetokenizeBody, await read_body(request, service.limits))
    check_model(service, body.model)
    tokenizer = tokenizer_of(service, "tokens")
    return JSONResponse({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})


async def openapi(_: Request) -> Response:
    """A description of what can be posted, for clients and fuzzers."""
    posts = {
        "/v1/completions": CompletionBody,
        "/v1/chat/completions": ChatBody,
        "/tokenize": TokenizeBody,
        "/detokenize": DetokenizeBody,
    }
    gets = (
        "/v1/models",
        "/v1/settings",
        "/health",
        "/ping",
        "/version",
        "/load",
        "/metrics",
    )
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, body in posts.items():
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[body.__name__] = schema
        content = {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}
        paths[path] = {
            "post": {
                "requestBody": {"required": True, "content": {"application/json": content}},
                "responses": {
                    "200": {"description": "the answer, or a stream of events"},
                    "400": {"description": "a field at fault, named in error.param"},
                    "404": {"description": "a model that is not served here"},
                    "408": {"description": "the time limit"},
                    "413": {"description": "the size limit"},
                    "503": {"description": "the queue is full; see Retry-After"},
                },
            }
        }
    for path in gets:
        paths[path] = {"get": {"responses": {"200": {"description": "the state of the server"}}}}
    return JSONResponse(
        {
            "openapi": "3.1.0",
            "info": {"title": "vk", "version": package_version("vkengine")},
            "paths": paths,
            "components": {"schemas": schemas},
        }
    )
